"""Reads of adapters at the front end, and its messages about contents in use."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, content_hash
from vlora.cluster import adapter_sender
from vlora.cluster.adapter_messages import FilesCall, FilesReply, Finish, Hold, Offer, Piece
from vlora.cluster.adapter_sender import AdapterContent, AdapterSender, ReplicaFiles, ShippingLimits
from vlora.cluster.adapter_state import DesiredAdapter
from vlora.errors import Aborted, BadAdapter


def write(folder: Path, weights: bytes = b"old") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text("{}")
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder


async def read(sender: AdapterSender, folder: Path) -> AdapterContent:
    found = await sender.content_of(str(folder))
    assert found is not None
    return found


class ScriptedClient:
    """A replica that answers each call with the result of a function."""

    def __init__(self, answer: Callable[[FilesCall], FilesReply]) -> None:
        self.calls: list[FilesCall] = []
        self._answer = answer

    @property
    def next_file_id(self) -> int:
        return len(self.calls)

    def call_files(self, call: FilesCall) -> asyncio.Future[FilesReply]:
        self.calls.append(call)
        found: asyncio.Future[FilesReply] = asyncio.get_running_loop().create_future()
        found.set_result(self._answer(call))
        return found


def test_files_with_the_time_and_size_of_others_are_read(tmp_path: Path) -> None:
    async def main() -> None:
        sender, folder = AdapterSender(ShippingLimits()), write(tmp_path / "signs")
        file = folder / WEIGHTS_FILE
        before = file.stat()
        assert (await read(sender, folder)).version == content_hash(folder)
        with file.open("r+b") as stream:
            stream.write(b"new")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp --preserve` of an archive's files does
        assert (await read(sender, folder)).version == content_hash(folder)

    asyncio.run(main())


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sender, folder = AdapterSender(ShippingLimits()), write(tmp_path / "signs")

        def hashed(path: Path) -> str:
            found = content_hash(path)
            write(folder, b"longer")
            return found

        monkeypatch.setattr(adapter_sender, "content_hash", hashed)
        with pytest.raises(BadAdapter, match="was changed while it was read"):
            await sender.content_of(str(folder))
        monkeypatch.undo()
        assert (await read(sender, folder)).version == content_hash(folder)

    asyncio.run(main())


def test_replicas_that_join_at_once_read_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sender, folder, other = AdapterSender(ShippingLimits()), write(tmp_path / "signs"), write(tmp_path / "other")
        num_read, go_on = 0, threading.Event()

        def hashed(path: Path) -> str:
            nonlocal num_read
            if path == folder:
                num_read += 1
                assert go_on.wait(5)
            return content_hash(path)

        monkeypatch.setattr(adapter_sender, "content_hash", hashed)
        reading = [asyncio.create_task(read(sender, folder)) for _ in range(3)]
        await read(sender, other)  # a slow disk delays no other folder
        go_on.set()
        assert {found.version for found in await asyncio.gather(*reading)} == {content_hash(folder)}
        assert num_read == 1

    asyncio.run(main())


def answers_of(store: str, missing: tuple[str, ...] = ()) -> Callable[[FilesCall], FilesReply]:
    def answer(call: FilesCall) -> FilesReply:
        match call:
            case Offer():
                return FilesReply(call_id=call.call_id, path="" if missing else store, missing=missing)
            case Finish():
                return FilesReply(call_id=call.call_id, path=store)
        return FilesReply(call_id=call.call_id)

    return answer


def files_of(client: ScriptedClient) -> ReplicaFiles:
    fake: Any = client
    return ReplicaFiles(AdapterSender(ShippingLimits()), fake)


def test_contents_in_use_are_named_whenever_others_may_be_held(tmp_path: Path) -> None:
    async def main() -> None:
        client = ScriptedClient(answers_of("/store/x"))
        files, folder = files_of(client), write(tmp_path / "signs")
        wanted = DesiredAdapter(str(folder), content_hash(folder))
        kept = "f" * 32  # received before the line was opened again
        await files.hold({kept})
        assert await files.send(wanted) == "/store/x"
        await files.hold({kept})  # the engine has refused it, so the replica need not hold it
        await files.hold({kept})
        assert [call.versions for call in client.calls if isinstance(call, Hold)] == [(kept,), (kept,)]

    asyncio.run(main())


def test_a_content_that_is_not_wanted_any_more_is_not_sent_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(adapter_sender, "PIECE_BYTES", 10)
        client = ScriptedClient(answers_of("/store/x", (WEIGHTS_FILE,)))
        files, folder = files_of(client), write(tmp_path / "signs", bytes(100))
        wanted = DesiredAdapter(str(folder), content_hash(folder))
        with pytest.raises(Aborted, match="not wanted"):
            await files.send(wanted, lambda: len(client.calls) < 4)
        assert [type(call) for call in client.calls] == [Offer, Piece, Piece, Piece, Finish]
        assert files.num_bytes_sent == 30 and not files.progress
        assert await files.send(wanted) == "/store/x"
        assert files.num_bytes_sent == 130

    asyncio.run(main())


def test_a_content_that_returns_while_it_is_looked_for_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        folder, away = write(tmp_path / "signs"), tmp_path / "away"
        client = ScriptedClient(answers_of("/store/x", (WEIGHTS_FILE,)))
        files = files_of(client)
        wanted = DesiredAdapter(str(folder), content_hash(folder))
        folder.rename(away)
        find = files.find

        async def returning(wanted: DesiredAdapter) -> str | None:
            shutil.copytree(away, folder)
            return await find(wanted)

        monkeypatch.setattr(files, "find", returning)
        assert await files.send(wanted) == "/store/x"

    asyncio.run(main())
