"""The adapters' state on disk: precedence at a start, crashes at any moment, full disks, and other servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlora.cluster.adapter_state import FILE, AdapterState, DesiredAdapter, replace_file
from vlora.errors import BadConfig, VLoraError

FIRST, SECOND = DesiredAdapter("/first", "1", True), DesiredAdapter("/second", "2")


def stored(folder: Path) -> dict[str, DesiredAdapter]:
    """The adapters of a folder, as a later server reads them."""
    state = AdapterState.open(folder)
    state.close()
    return state.adapters


def commit(folder: Path, given: dict[str, str], **changes: DesiredAdapter | None) -> AdapterState:
    """A server's life: it starts with given folders, and changes adapters."""

    async def main() -> AdapterState:
        state = AdapterState.open(folder)
        starting = state.begin(given)
        await state.commit({name: DesiredAdapter(path) for name, path in starting.new.items()})
        await state.commit(changes)
        state.close()
        return state

    return asyncio.run(main())


def test_a_change_is_read_by_the_next_server(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    commit(folder, {}, x=FIRST, y=SECOND)
    assert stored(folder) == {"x": FIRST, "y": SECOND}
    commit(folder, {}, x=None)
    assert stored(folder) == {"y": SECOND}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # paths are not for others
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600


def test_contents_that_are_read_first_are_written_later(tmp_path: Path) -> None:
    async def main() -> None:
        state = AdapterState.open(tmp_path)
        await state.commit({"x": DesiredAdapter("/x")})
        state.adopt("x", "1")
        await state.flush()
        state.adopt("x", "2")
        await state.commit({"y": SECOND})
        state.close()

    asyncio.run(main())
    assert stored(tmp_path) == {"x": DesiredAdapter("/x", "2"), "y": SECOND}


def test_the_later_word_wins_at_a_start(tmp_path: Path) -> None:
    given = {name: f"/{name}" for name in ("same", "moved", "reloaded", "unloaded", "dropped", "dropped too")}
    commit(tmp_path, given, reloaded=SECOND, unloaded=None, loaded=FIRST, **{"dropped too": SECOND})
    state = AdapterState.open(tmp_path)
    now = {name: f"/{name}" for name in ("same", "reloaded", "unloaded", "new")} | {"moved": "/elsewhere"}
    starting = state.begin(now)
    # A new or changed folder of the command line wins over the state; elsewhere the state is later.
    assert starting.new == {"moved": "/elsewhere", "new": "/new"}
    assert state.adapters == {
        "same": DesiredAdapter("/same"),
        "reloaded": SECOND,
        "loaded": FIRST,
        "dropped too": SECOND,  # it was loaded since from another folder
    }
    assert starting.lines == (
        "adapters served as loaded later, not from the given folder: reloaded",
        "adapters unloaded later, and not served: unloaded",
        "adapters not given any more, and not served: dropped",
    )
    state.close()
    # A start that is not completed changes nothing.
    assert stored(tmp_path).keys() == {"same", "moved", "reloaded", "loaded", "dropped", "dropped too"}
    commit(tmp_path, now)
    assert AdapterState.open(tmp_path).begin(now).new == {}


def test_a_folder_that_another_server_uses_is_refused(tmp_path: Path) -> None:
    state = AdapterState.open(tmp_path)
    with pytest.raises(BadConfig, match=r"another server uses .*; give each server a folder of its own"):
        AdapterState.open(tmp_path)
    state.close()
    AdapterState.open(tmp_path).close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"adapters": {"x": {}}}',
        '{"adapters": {"x": {"path": 3}}}',
        '{"adapters": {"x": {"path": "\xff"}}}',  # no UTF-8
        '{"other": 1}',
    ],
)
def test_a_file_that_is_no_state_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, "latin-1")
    with pytest.raises(BadConfig, match=r"adapters.json is not a state of adapters \(.*\); move it away"):
        AdapterState.open(tmp_path)
    assert (tmp_path / FILE).read_text("latin-1") == text
    (tmp_path / FILE).unlink()
    AdapterState.open(tmp_path).close()  # it is not locked


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match="the adapters' state cannot be kept there"):
        AdapterState.open(tmp_path / "file")
    with pytest.raises(BadConfig, match="the folder above it does not exist; make it first"):
        AdapterState.open(tmp_path / "a" / "b")


_LIFE = """
import asyncio, os, signal, sys
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
async def main():
    state = AdapterState.open(sys.argv[1])
    real = getattr(os, sys.argv[2])
    number = int(sys.argv[3])
    calls = []
    def call(*args):
        calls.append(args)
        if len(calls) == number: die()
        return real(*args)
    setattr(os, sys.argv[2], call)
    await state.commit({"x": DesiredAdapter("/second", "2"), "y": DesiredAdapter("/y" * 100000)})
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("call", "number", "new"), [("fsync", 1, False), ("replace", 1, False), ("fsync", 2, True), ("close", 99, True)]
)
def test_a_killed_server_leaves_the_former_state_or_the_new_one(
    tmp_path: Path, call: str, number: int, new: bool
) -> None:
    commit(tmp_path, {}, x=FIRST)
    code = subprocess.run([sys.executable, "-c", _LIFE, tmp_path, call, str(number)], timeout=30).returncode
    assert code == (0 if number == 99 else -signal.SIGKILL)
    found = stored(tmp_path)
    assert found["x"] == (DesiredAdapter("/second", "2") if new else FIRST) and len(found) == 1 + new
    commit(tmp_path, {}, z=SECOND)  # a leftover file does not prevent it
    assert stored(tmp_path).keys() == {*found, "z"}
    assert not (tmp_path / (FILE + ".new")).exists()


_FULL = """
import resource, signal, sys
from pathlib import Path
from vlora.cluster.adapter_state import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    replace_file(Path(sys.argv[1]), b"x" * 2000)
except OSError as error:
    print(error.strerror)
"""


def test_a_file_that_cannot_be_written_in_full_is_kept(tmp_path: Path) -> None:
    file = tmp_path / FILE
    replace_file(file, b"former")
    said = subprocess.run([sys.executable, "-c", _FULL, file], capture_output=True, text=True, timeout=30).stdout
    assert said.strip() == "File too large"
    assert file.read_bytes() == b"former" and os.listdir(tmp_path) == [FILE]


def test_writes_do_not_overlap_when_a_change_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0

    def slow(path: Path, data: bytes) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.1)
        replace_file(path, data)
        under_way -= 1

    async def main() -> None:
        state = AdapterState.open(tmp_path)
        cancelled = asyncio.create_task(state.commit({"x": FIRST}))
        await asyncio.sleep(0.03)
        cancelled.cancel()
        await state.commit({"y": SECOND})
        assert cancelled.cancelled()
        state.close()

    monkeypatch.setattr("vlora.cluster.adapter_state.replace_file", slow)
    asyncio.run(main())
    assert most == 1 and stored(tmp_path)["y"] == SECOND


def test_a_change_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, {}, x=FIRST)

    async def main() -> None:
        state = AdapterState.open(tmp_path)

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("vlora.cluster.adapter_state.replace_file", full)
            with pytest.raises(VLoraError, match="so the adapters were not changed: No space left on device"):
                await state.commit({"x": None, "y": SECOND})
            assert state.adapters == {"x": FIRST}
            state.adopt("x", "3")
            with pytest.raises(VLoraError):
                await state.flush()
        await state.flush()  # the content is written later
        state.close()

    asyncio.run(main())
    assert stored(tmp_path) == {"x": DesiredAdapter("/first", "3", True)}
    assert json.loads((tmp_path / FILE).read_text())["given"] == {}
