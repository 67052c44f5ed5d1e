"""What a server keeps on disk: its adapters, and the record of its routing. Crashes, full disks, other servers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S
from vlora.cluster import journal_file
from vlora.cluster.adapter_state import FILE, AdapterState, DesiredAdapter
from vlora.cluster.journal_file import JournalFile
from vlora.errors import BadConfig, VLoraError
from vlora.routing import replay_file
from vlora.run_folder import write_whole

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

    async def main() -> None:
        """Contents that are read first are written later."""
        state = AdapterState.open(folder)
        await state.commit({"x": DesiredAdapter("/x")})
        state.adopt("x", "1")
        await state.flush()
        state.adopt("x", "2")
        await state.commit({"y": SECOND})
        state.close()

    asyncio.run(main())
    assert stored(folder) == {"x": DesiredAdapter("/x", "2"), "y": SECOND}


def test_folders_and_files_that_cannot_be_used_are_refused_and_kept(tmp_path: Path) -> None:
    state = AdapterState.open(tmp_path)
    with pytest.raises(BadConfig, match=r"another server uses .*; give each server a folder of its own"):
        AdapterState.open(tmp_path)
    state.close()
    for text in ("", "{", "[]", '{"adapters": {"x": {}}}', '{"adapters": {"x": {"path": 3}}}', '{"other": 1}', "\xff"):
        (tmp_path / FILE).write_text(text, "latin-1")
        with pytest.raises(BadConfig, match=r"adapters.json is not a state of adapters \(.*\); move it away"):
            AdapterState.open(tmp_path)
        assert (tmp_path / FILE).read_text("latin-1") == text
    (tmp_path / FILE).unlink()
    AdapterState.open(tmp_path).close()  # it is not locked
    (tmp_path / "file").write_text("")
    for folder, reason in (
        ("file", "the adapters' state cannot be kept there"),
        ("a/b", "the folder above it does not"),
    ):
        with pytest.raises(BadConfig, match=reason):
            AdapterState.open(tmp_path / folder)


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


_LIFE = """
import asyncio, os, resource, signal, sys
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
async def main():
    state = AdapterState.open(sys.argv[1])
    name, number, calls = sys.argv[2], int(sys.argv[3]), []
    if name == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    else:
        real = getattr(os, name)
        def call(*args):
            calls.append(args)
            if len(calls) == number: os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)
        setattr(os, name, call)
    await state.commit({"x": DesiredAdapter("/second", "2"), "y": DesiredAdapter("/y" * 100000)})
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("call", "number", "new", "code"),
    [
        ("replace", 1, False, -signal.SIGKILL),
        ("fsync", 2, True, -signal.SIGKILL),
        pytest.param("fsync", 1, False, -signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param("close", 99, True, 0, marks=pytest.mark.exhaustive),
        ("full", 1000, False, 1),
    ],
)
def test_a_killed_server_or_a_full_disk_leaves_the_former_state_or_the_new_one(
    tmp_path: Path, call: str, number: int, new: bool, code: int
) -> None:
    commit(tmp_path, {}, x=FIRST)
    command = [sys.executable, "-c", _LIFE, str(tmp_path), call, str(number)]
    done = subprocess.run(command, timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == code and (call != "full" or "so the adapters were not changed: File too l" in done.stderr)
    found = stored(tmp_path)
    assert found["x"] == (DesiredAdapter("/second", "2") if new else FIRST) and len(found) == 1 + new
    commit(tmp_path, {}, z=SECOND)  # a leftover file does not prevent it
    assert stored(tmp_path).keys() == {*found, "z"} and not list(tmp_path.glob("unfinished-*"))


def test_writes_do_not_overlap_when_a_change_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0

    def slow(path: Path, data: bytes, mode: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.1)
        write_whole(path, data, mode=mode)
        under_way -= 1

    async def main() -> None:
        state = AdapterState.open(tmp_path)
        cancelled = asyncio.create_task(state.commit({"x": FIRST}))
        await asyncio.sleep(0.03)
        cancelled.cancel()
        await state.commit({"y": SECOND})
        assert cancelled.cancelled()
        state.close()

    monkeypatch.setattr("vlora.cluster.adapter_state.write_whole", slow)
    asyncio.run(main())
    assert most == 1 and stored(tmp_path)["y"] == SECOND


def test_a_change_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, {}, x=FIRST)

    async def main() -> None:
        state = AdapterState.open(tmp_path)

        def full(path: Path, data: bytes, mode: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("vlora.cluster.adapter_state.write_whole", full)
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


# -- the record of routing --------------------------------------------------------------------------------------------


def test_the_record_is_bounded_and_a_full_disk_ends_it_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "routing.jsonl", [0.0]
    journal = JournalFile(str(path), max_bytes=30)
    for _ in range(5):
        journal.write(b"0123456789")
    assert path.read_bytes() == b"0123456789\n" * 2
    second = JournalFile(str(path))
    assert path.read_bytes() == b"" and Path(f"{path}.1").read_bytes() == b"0123456789\n" * 2
    second.write(b"x")
    with pytest.raises(BadConfig, match=IN_USE):
        JournalFile(str(path))
    second.close()
    second.close()
    assert path.read_bytes() == b"x\n"
    full = JournalFile("/dev/full", clock=lambda: now[0])
    for _ in range(9):
        now[0] += 2
        full.write(b"line")
    assert [record.message for record in caplog.records] == [
        f"the routing journal {path} is full and ends here; serving goes on",
        "the routing journal /dev/full ends here: No space left on device; serving goes on",
    ]


def test_two_servers_that_begin_at_once_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "routing.jsonl"
    path.write_bytes(b"earlier\n")
    path.chmod(0o644)
    flock, others = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        """The other server begins after this one has opened the file and before it locks it."""
        monkeypatch.setattr(fcntl, "flock", flock)
        others.append(JournalFile(str(path)))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(BadConfig, match=IN_USE):
        JournalFile(str(path))
    others[0].write(b"x")
    others[0].close()
    assert path.read_bytes() == b"x\n" and Path(f"{path}.1").read_bytes() == b"earlier\n"


IN_USE = "is being written by another server; choose another file$"
REQUEST = b'{"rule": "placed"}\n["submit",[],[]]\n'


def begin(path: Path, content: bytes) -> None:
    """A start, and its record."""
    journal = JournalFile(str(path))
    for line in content.splitlines():
        journal.write(line)
    journal.close()


def earlier(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file != path}


def test_each_start_keeps_the_records_before_it(tmp_path: Path) -> None:
    """Starts without a request displace none. Only the owner reads a file that was there before."""
    path = tmp_path / "routing[1].jsonl"
    (tmp_path / "routing[1].jsonl.1x").write_bytes(b"another file")
    records = [REQUEST + b"%d\n" % number for number in range(12)]
    for record in records:
        begin(path, record)
        for _ in range(2):
            begin(path, b'{"rule": "placed"}\n["join",["a",[8,1000,1073741824],true],[]]\n')
    path.write_bytes(b"notes of someone\n")  # given by mistake
    begin(path, REQUEST)
    found = earlier(path)
    assert found.pop("routing[1].jsonl.1x") == b"another file"
    expected = [*records, b"notes of someone\n"]
    assert found == {f"{path.name}.{number}": record for number, record in enumerate(expected, 1)}
    for name in ("empty", "linked"):
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for name in ("empty", "link"):
        JournalFile(str(tmp_path / name)).close()
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("empty", "linked")] == [0o600, 0o600]


@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_the_first_records_over_a_limit_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    path = tmp_path / "routing.jsonl"
    if limit == "number":
        monkeypatch.setattr(journal_file, "MAX_EARLIER", 3)
    else:
        monkeypatch.setattr(journal_file, "MAX_EARLIER_BYTES", 3 * len(REQUEST))
    for _ in range(7):
        begin(path, REQUEST)
    assert sorted(earlier(path)) == [f"routing.jsonl.{number}" for number in (4, 5, 6)]
    path.write_bytes(REQUEST * 100)  # more than all may have
    begin(path, REQUEST)
    kept = {"number": ("5", "6", "7"), "bytes": ("7",)}[limit]
    assert sorted(earlier(path)) == [f"routing.jsonl.{number}" for number in kept]


def test_a_file_that_cannot_be_written_or_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"^--routing-journal .* cannot be written: Is a directory$"):
        JournalFile(str(tmp_path))
    with pytest.raises(BadConfig, match=r"cannot be read: No such file or directory$"):
        replay_file(str(tmp_path / "nothing"))
    file = tmp_path / "other"
    for content, message in (
        (b"", "the record of routing is empty; it has a line when the server has started"),
        (b"TIMESTAMP,ContextTokens\n", "line 1 is no line of a record of routing: "),
        (b'{"rule":"best"}\n', "line 1 is no line of a record of routing: no routing rule named 'best'"),
        (b'{"rule":"placed","weights":3}\n', "line 1 is no line of a record of routing: "),
        (b'{"rule":"placed","weights":{"a":"x"}}\n["replan",[],null]\n', "line 1 is no line of a record of routing: "),
        (b'{"rule":null}\n', "line 1 is no line of a record of routing: "),
        (b"[" * 100_000 + b"\n", "line 1 is no line of a record of routing: "),
        (b'{"rule":"placed"}\n["advice",' + b"[" * 100_000 + b"\n", "line 2 is no line of a record of routing: "),
        (b'{"rule":"placed"}\n["fly",[],null]\n', "line 2 is no line of a record of routing: "),
        (b'{"rule":"placed"}\n["ended",[1],null]\n', "line 2 is no line of a record of routing: "),
    ):
        file.write_bytes(content)
        with pytest.raises(BadConfig) as caught:
            replay_file(str(file))
        assert str(caught.value).startswith(f"{file}: {message}")
