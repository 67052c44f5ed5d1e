"""Adapters sent to machines of replicas without the files, with sleeping engines in processes of their own.

A machine is a working directory with caches of its own. `/proc/self/cwd` makes one path lead to the files of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from tests.cluster.running import Running, outputs_of, run, running
from tests.cluster.test_cluster import asked, check
from vlora.adapter_files import content_hash
from vlora.cluster import adapter_failure, adapter_sender
from vlora.cluster.adapter_messages import Hold, Offer, Piece, ShippedFile
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.cluster import Cluster
from vlora.errors import BadAdapter, OverCapacity
from vlora.server.cluster_metrics import ClusterCollector
from vlora.types.replicas import AdapterPlace

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]

HERE = "/proc/self/cwd"
LIMITS = ShippingLimits(adapter_bytes=64 << 20, total_bytes=256 << 20)


def write(folder: Path, seed: int = 0, size: int = 300_000, heads: bool = False) -> str:
    """Write an adapter's files. Returns the content's hash."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"seed": {seed}}}')
    (folder / "adapter_model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    if heads:
        (folder / "heads.json").write_text("{}")
        (folder / "heads.safetensors").write_bytes(b"")
    (folder / "README.md").write_text("not an adapter's file")
    return content_hash(folder)


@contextlib.asynccontextmanager
async def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, shipping: ShippingLimits | None = LIMITS
) -> AsyncIterator[Running]:
    """A cluster with a replica on a machine for each name; the front end is on one of its own."""
    for name in ("front", *names):
        (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "front")
    async with running(shipping=shipping) as here:
        for name in names:
            await here.add(name, machine=tmp_path / name)
        yield here


def store(tmp_path: Path, name: str) -> Path:
    return tmp_path / name / "cache" / "vlora" / "adapters"


async def places(cluster: Cluster, adapter: str) -> dict[str, AdapterPlace]:
    return {place.replica: place for place in await cluster.adapter_places() if place.adapter == adapter}


async def settled(here: Running, adapter: str, state: str, replica: str) -> AdapterPlace:
    """The adapter's place on a replica once it has this state."""
    async with asyncio.timeout(20):
        while (found := (await places(here.cluster, adapter))[replica]).state != state:
            await asyncio.sleep(0.05)
    return found


async def check_answers(here: Running, adapter: str, version: str, num_replicas: int) -> None:
    """Every replica answers with this content."""
    for name in list(here.replicas)[:num_replicas]:
        for other in here.replicas:
            here.router.drain(other, other != name)
        request = asked(f"{adapter} on {name} {time.monotonic()}", 10, adapter=adapter)
        check(request, await outputs_of(here.cluster, request), version)
    for name in here.replicas:
        here.router.drain(name, False)


def test_a_replica_without_the_files_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        version = write(tmp_path / "front" / "signs", heads=True)
        write(tmp_path / "b" / "signs", seed=1)  # other content at the path
        write(tmp_path / "c" / "signs", heads=True)  # the same content
        async with machines(tmp_path, monkeypatch, "a", "b", "c") as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            await check_answers(here, "signs", version, 3)
            for name in "ab":
                [folder] = (path for path in store(tmp_path, name).iterdir() if path.is_dir())
                assert folder.name == version == content_hash(folder)
                assert "README.md" not in os.listdir(folder)
                assert store(tmp_path, name).stat().st_mode & 0o777 == 0o700
            assert not store(tmp_path, "c").exists()
            status = here.cluster.status()
            sizes = [file.stat().st_size for file in (tmp_path / "front" / "signs").iterdir() if file.suffix != ".md"]
            assert [each.num_shipped_bytes for each in status.replicas] == [sum(sizes), sum(sizes), 0]
            metrics = CollectorRegistry()
            metrics.register(ClusterCollector(lambda: status))
            assert metrics.get_sample_value("vlora_shipped_bytes_total", {"replica": "b"}) == sum(sizes)
            newer = write(tmp_path / "front" / "newer", seed=2)
            assert (await here.cluster.load_adapter("signs", f"{HERE}/newer")).version == newer
            await check_answers(here, "signs", newer, 3)

    run(main())


def test_without_shipping_the_files_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        write(tmp_path / "front" / "signs")
        write(tmp_path / "a" / "signs")
        async with machines(tmp_path, monkeypatch, "a", shipping=None) as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            (tmp_path / "b").mkdir()
            await here.add("b", machine=tmp_path / "b")
            found = await settled(here, "signs", "failed", "b")
            assert "there is no such file" in found.cause
            with pytest.raises(BadAdapter, match="there is no such file"):
                await here.cluster.load_adapter("other", f"{HERE}/signs")
            assert not store(tmp_path, "b").exists()

    run(main())


class Sent:
    """The pieces that the front end has sent.

    pause_s: between two of them. stopped: none is sent meanwhile. spoil: changes the bytes of each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        self.pause_s = 0.0
        self.stopped = self.spoil = False
        read = adapter_sender.pieces_of

        async def pieces(path: Path, size: int) -> AsyncIterator[bytes]:
            self.names.append(path.name)
            async for data in read(path, size):
                self.num_bytes += len(data)
                await asyncio.sleep(self.pause_s)
                while self.stopped:
                    await asyncio.sleep(0.01)
                yield bytes(len(data)) if self.spoil else data

        monkeypatch.setattr(adapter_sender, "pieces_of", pieces)


def test_replicas_of_one_machine_get_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        version = write(tmp_path / "front" / "signs")
        async with machines(tmp_path, monkeypatch, "a") as here:
            sent.pause_s = 0.1
            await here.add("b", machine=tmp_path / "a")
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            assert sent.names == ["adapter_config.json", "adapter_model.safetensors"]
            await check_answers(here, "signs", version, 2)
            # The same weights with other settings.
            (tmp_path / "front" / "signs" / "adapter_config.json").write_text("{}")
            status = await here.cluster.load_adapter("signs", f"{HERE}/signs")
            assert sent.names[2:] == ["adapter_config.json"]
            await check_answers(here, "signs", status.version, 2)

    run(main())


def test_a_replica_that_joins_serves_before_it_has_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        version = write(tmp_path / "front" / "signs", size=600_000)
        other = write(tmp_path / "front" / "other", seed=1)
        async with machines(tmp_path, monkeypatch, "a") as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            write(tmp_path / "b" / "other", seed=1)
            await here.cluster.register_adapters({"other": f"{HERE}/other"})
            sent.stopped = True
            await here.add("b", machine=tmp_path / "b")
            here.router.drain("a")
            request = asked("other", 10, adapter="other")
            check(request, await outputs_of(here.cluster, request), other)
            found = await settled(here, "signs", "pending", "b")
            assert "of its files" in found.cause or "are to be sent" in found.cause
            assert [each.num_failed_adapters for each in here.cluster.status().replicas] == [0, 0]
            here.router.drain("a", False)
            await here.cluster.remove("a")  # the only one that has the files
            waiting = [asked(f"early {number}", 10, adapter="signs") for number in range(3)]
            answers = [asyncio.create_task(outputs_of(here.cluster, request)) for request in waiting]
            request = replace(asked("impatient", 10, adapter="signs"), max_ttft_s=0.3)
            error = (await outputs_of(here.cluster, request))[-1].error
            assert error is not None and error.code == "deadline_unreachable"
            request = asked("another adapter", 10, adapter="other")  # it is not held up
            check(request, await outputs_of(here.cluster, request), other)
            assert (await places(here.cluster, "signs"))["b"].state == "pending"
            await here.cluster.cancel("early 2")
            assert (await answers.pop())[-1].finish_reason == "cancelled"
            assert not any(answer.done() for answer in answers)
            sent.stopped = False
            for request, answer in zip(waiting[:2], await asyncio.gather(*answers), strict=True):
                check(request, answer, version)
            await settled(here, "signs", "device", "b")
            request = asked("later", 10, adapter="signs")
            check(request, await outputs_of(here.cluster, request), version)

    run(main())


def test_wrong_bytes_are_refused_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        monkeypatch.setattr(adapter_failure, "FIRST_PAUSE_S", 0.2)
        version = write(tmp_path / "front" / "signs")
        write(tmp_path / "a" / "signs")
        async with machines(tmp_path, monkeypatch, "a") as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            sent.spoil = True
            (tmp_path / "b").mkdir()
            await here.add("b", machine=tmp_path / "b")
            found = await settled(here, "signs", "failed", "b")
            assert "adapter_config.json arrived with content" in found.cause
            assert os.listdir(store(tmp_path, "b")) == ["store.lock"]
            with pytest.raises(BadAdapter, match=r"replica 'b': adapter_config.json arrived with content"):
                await here.cluster.load_adapter("second", f"{HERE}/signs")
            sent.spoil = False
            await settled(here, "signs", "device", "b")
            await check_answers(here, "signs", version, 2)

    run(main())


def test_limits_are_one_line_for_each_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        small = ShippingLimits(adapter_bytes=400_000, total_bytes=700_000)
        versions = [write(tmp_path / "front" / f"x{number}", seed=number) for number in range(3)]
        write(tmp_path / "front" / "large", size=500_000)
        async with machines(tmp_path, monkeypatch, "a", shipping=small) as here:
            with pytest.raises(BadAdapter, match="replica 'a': its files have 500011 bytes, over the limit of 400000"):
                await here.cluster.load_adapter("large", f"{HERE}/large")
            await here.cluster.register_adapters({f"x{number}": f"{HERE}/x{number}" for number in range(2)})
            with pytest.raises(OverCapacity, match=r"replica 'a': the folder of .* has no room for 300523 bytes"):
                await here.cluster.load_adapter("x2", f"{HERE}/x2")
            await check_answers(here, "x1", versions[1], 1)
            await here.cluster.unload_adapter("x0")  # its files may go now
            await here.cluster.load_adapter("x2", f"{HERE}/x2")
            assert {path.name for path in store(tmp_path, "a").iterdir() if path.is_dir()} == {*versions[1:]}
            await check_answers(here, "x2", versions[2], 1)

    run(main())


def test_killed_in_the_middle_a_machine_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        version = write(tmp_path / "front" / "signs", size=3_000_000)
        write(tmp_path / "a" / "signs", size=3_000_000)
        (tmp_path / "b").mkdir()
        async with machines(tmp_path, monkeypatch, "a") as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            sent.pause_s = 0.02
            await here.add("b", machine=tmp_path / "b")
            while sent.num_bytes < 1_000_000:
                await asyncio.sleep(0.02)
            here.replicas["b"].signal(signal.SIGKILL)
            await here.replicas["b"].wait_ended()
            assert {path.name for path in store(tmp_path, "b").iterdir() if path.is_dir()} == {version + ".part"}
            sent.pause_s = 0.0
            await here.cluster.remove("b")
            await here.add("b", machine=tmp_path / "b")
            await settled(here, "signs", "device", "b")
            await check_answers(here, "signs", version, 2)
            # A front end that ends leaves no part either.
            write(tmp_path / "front" / "next", seed=1, size=3_000_000)
            sent.pause_s = 0.05
            loading = asyncio.create_task(here.cluster.load_adapter("next", f"{HERE}/next"))
            await asyncio.sleep(0.5)
            loading.cancel()
            await asyncio.wait({loading})
            await here.cluster.remove("a")
            await here.cluster.remove("b")
            for name in "ab":
                while any(path.suffix == ".part" for path in store(tmp_path, name).glob("*")):
                    await asyncio.sleep(0.02)

    run(main())


def test_content_that_the_front_end_has_no_more_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        version = write(tmp_path / "front" / "signs")
        write(tmp_path / "a" / "signs")
        (tmp_path / "b").mkdir()
        async with machines(tmp_path, monkeypatch, "a") as here:
            await here.cluster.register_adapters({"signs": f"{HERE}/signs"})
            write(tmp_path / "front" / "signs", seed=1)  # changed in place
            await here.add("b", machine=tmp_path / "b")
            found = await settled(here, "signs", "failed", "b")
            await here.cluster.remove("a")
            error = (await outputs_of(here.cluster, asked("r", 10, adapter="signs")))[-1].error
            assert error is not None and "cannot be sent" in error.message  # so the request waits for nothing
            assert f"content {version} is not on the replica's machine, and cannot be sent" in found.cause
            with pytest.raises(BadAdapter, match="there is no such file"):  # on no machine
                await here.cluster.load_adapter("none", f"{HERE}/none")

    run(main())


def test_other_changes_do_not_wait_for_the_files_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        write(tmp_path / "front" / "signs", size=1_000_000)
        write(tmp_path / "front" / "other", seed=1, size=1000)
        async with machines(tmp_path, monkeypatch, "a", "b") as here:
            await here.cluster.register_adapters({"other": f"{HERE}/other"})
            sent.stopped = True
            loading = asyncio.create_task(here.cluster.load_adapter("signs", f"{HERE}/signs"))
            async with asyncio.timeout(10):
                while sent.names.count("adapter_config.json") < 4:  # to both replicas at once
                    await asyncio.sleep(0.01)
                await here.cluster.pin_adapter("other", True)
                await here.cluster.unload_adapter("other")
            assert not loading.done()
            loading.cancel()
            await asyncio.wait({loading})
            sent.stopped = False
            await here.cluster.load_adapter("signs", f"{HERE}/signs")

    run(main())


def test_a_name_with_dots_is_refused_by_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with machines(tmp_path, monkeypatch, "a") as here:
            client = here.cluster.members["a"].client
            assert client is not None
            good = Offer(
                call_id=client.next_file_id,
                path="/none",
                version="0" * 32,
                files=(ShippedFile("../../escaped", 1, ""),),
                receive=True,
                adapter_bytes=100,
                total_bytes=100,
            )
            reply = await client.call_files(good)
            assert reply.error is not None and "'../../escaped' is no file of an adapter" in reply.error.message
            piece = Piece(client.next_file_id, "../" + "0" * 29, "../../escaped", b"x")
            reply = await client.call_files(piece)
            assert reply.error is not None and reply.error.code == "bad_request"
            reply = await client.call_files(Hold(client.next_file_id, ("..",)))
            assert reply.error is not None and reply.error.code == "bad_request"
            assert not list(tmp_path.rglob("*escaped*")) and not store(tmp_path, "a").exists()

    run(main())


def test_tokens_go_on_while_files_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sent = Sent(monkeypatch)
        write(tmp_path / "front" / "signs", size=4_000_000)
        sent.pause_s = 0.01
        async with machines(tmp_path, monkeypatch, "a") as here:
            request = asked("r", 300)
            during: list[int] = []

            async def load() -> None:
                await here.cluster.load_adapter("signs", f"{HERE}/signs")
                during.append(sent.num_bytes)

            loading: list[asyncio.Task[None]] = []
            found = await outputs_of(here.cluster, request, 5, lambda: loading.append(asyncio.create_task(load())))
            check(request, found)
            assert during and loading[0].done()  # all of it within the answer

    run(main())
