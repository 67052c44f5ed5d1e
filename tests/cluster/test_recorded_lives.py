"""A live cluster's decisions are recorded, and repeated without it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.cluster.in_process import run_virtually
from tests.cluster.running import QUICK, SECRET, ReplicaProcess, outputs_of, run
from tests.cluster.sleeping_engine import STEP_VARIABLE
from tests.cluster.test_cluster import MIXED, asked, check
from tests.cluster.test_random_lives import Life, live
from vlora.cluster import journal_file
from vlora.cluster.cluster import Cluster
from vlora.cluster.journal_file import JournalFile
from vlora.errors import BadConfig
from vlora.routing import RecordedRouter, replay_calls, replay_file


def test_random_lives_repeat_their_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kills, pauses, moves, drains under load and cancellations, under all rules."""
    monkeypatch.setenv(STEP_VARIABLE, "0")
    lives: list[Life] = []
    records: list[list[bytes]] = []
    made = Life.__init__

    def recorded(life: Life, seed: int, *, crowded: bool) -> None:
        made(life, seed, crowded=crowded)
        lines: list[bytes] = []
        records.append(lines)
        over = 1.0 if crowded else 1.5
        life.router = RecordedRouter(lines.append, rule=life.router.rule.name, over=over).as_router

    monkeypatch.setattr(Life, "__init__", recorded)
    for seed in range(24):
        run_virtually(live(seed, monkeypatch, lives, crowded=seed % 2 == 1))
    for lines in records:
        found = replay_calls(lines)
        assert found.difference is None and found.num_calls == len(lines) - 1 > 20
    everything = b"".join(line for lines in records for line in lines)
    for name in ("join", "leave", "drain", "report", "submit", "ended", "grew", "consolidate", "recall"):
        assert everything.count(b'["%s",' % name.encode()) > 10, name
    assert any(line.startswith(b'["recall",[2],[[["r') for lines in records for line in lines)
    # Negative controls: another rule, and a call that is missing, lead to other decisions or to none.
    num_others = 0
    for lines in records:
        if b'"placed"' in lines[0]:
            other = [lines[0].replace(b"placed", b"punica"), *lines[1:]]
            num_others += replay_calls(other).difference is not None
        place = next(place for place, line in enumerate(lines) if line.startswith(b'["join"'))
        assert replay_calls(lines[:place] + lines[place + 1 :]).difference is not None
    assert num_others > 1


@pytest.mark.slow
def test_a_live_run_of_processes_replays_from_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "routing.jsonl")

    async def main() -> None:
        journal = JournalFile(path)
        cluster = Cluster(RecordedRouter(journal.write, rule="placed", over=1.0).as_router, SECRET, health=QUICK)
        replicas = {}
        try:
            for name in ("a", "b"):
                replicas[name] = await ReplicaProcess.start()
                await cluster.add(name, replicas[name].address)
            requests = [*MIXED, *(asked(f"x{number}", 40) for number in range(20))]
            answers = [asyncio.create_task(outputs_of(cluster, request)) for request in requests]
            await asyncio.sleep(0.1)
            assert await cluster.drain("a", 5.0)
            cluster.resume("a")
            replicas["b"].signal(signal.SIGKILL)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                check(request, outputs)
            status = cluster.status()
            assert status.num_moves and status.num_deaths == 1 and status.num_resubmitted
        finally:
            await cluster.close()
            await asyncio.gather(*(replica.stop() for replica in replicas.values()))
        journal.close()

    run(main())
    found = replay_file(path)
    assert found.difference is None and found.num_calls > 100
    assert os.stat(path).st_mode & 0o777 == 0o600
    lines = Path(path).read_bytes().splitlines(keepends=True)
    Path(path).write_bytes(b"".join(lines) + b'["submit",[["cut o')  # killed while it wrote
    assert replay_file(path) == found
    place, line = next((place, line) for place, line in enumerate(lines) if b'"submit"' in line and b'"a"]]]' in line)
    lines[place] = line.replace(b'"a"]]]', b'"b"]]]')
    Path(path).write_bytes(b"".join(lines))
    changed = replay_file(path)
    assert changed.difference is not None and (changed.num_calls, changed.difference[0]) == (place - 1, "submit")


def test_the_file_is_bounded_and_the_former_one_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "routing.jsonl"
    journal = JournalFile(str(path), max_bytes=30)
    for _ in range(5):
        journal.write(b"0123456789")
    assert path.read_bytes() == b"0123456789\n" * 2
    assert [record.message for record in caplog.records] == [
        f"the routing journal {path} is full and ends here; serving goes on"
    ]
    second = JournalFile(str(path))
    assert path.read_bytes() == b"" and Path(f"{path}.1").read_bytes() == b"0123456789\n" * 2
    second.write(b"x")
    with pytest.raises(BadConfig, match=r"is being written by another server; choose another file$"):
        JournalFile(str(path))
    second.close()
    second.close()
    assert path.read_bytes() == b"x\n"


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
    path = tmp_path / "routing[1].jsonl"
    (tmp_path / "routing[1].jsonl.1x").write_bytes(b"another file")
    records = [REQUEST + b"%d\n" % number for number in range(12)]
    for record in records:
        begin(path, record)
    found = earlier(path)
    assert found.pop("routing[1].jsonl.1x") == b"another file" and path.read_bytes() == records[-1]
    assert found == {f"{path.name}.{number}": record for number, record in enumerate(records[:-1], 1)}


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


def test_starts_without_a_request_displace_no_record(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    begin(path, REQUEST)
    for _ in range(3):
        begin(path, b'{"rule": "placed"}\n["join",["a",[8,1000,1073741824],true],[]]\n')
    assert earlier(path) == {"routing.jsonl.1": REQUEST}
    path.write_bytes(b"notes of someone\n")  # given by mistake
    begin(path, REQUEST)
    assert earlier(path) == {"routing.jsonl.1": REQUEST, "routing.jsonl.2": b"notes of someone\n"}


def test_only_the_owner_reads_a_file_that_was_there_before(tmp_path: Path) -> None:
    for path in (tmp_path / "empty", tmp_path / "linked"):
        path.write_bytes(b"")
        path.chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for name in ("empty", "link"):
        JournalFile(str(tmp_path / name)).close()
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("empty", "linked")] == [0o600, 0o600]


def test_two_servers_that_begin_at_once_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "routing.jsonl"
    path.write_bytes(b"earlier\n")
    flock, others = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        """The other server begins after this one has opened the file and before it locks it."""
        monkeypatch.setattr(fcntl, "flock", flock)
        others.append(JournalFile(str(path)))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(BadConfig, match=r"is being written by another server; choose another file$"):
        JournalFile(str(path))
    others[0].write(b"x")
    others[0].close()
    assert path.read_bytes() == b"x\n" and Path(f"{path}.1").read_bytes() == b"earlier\n"


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    journal = JournalFile("/dev/full", clock=lambda: now[0])
    caplog.set_level(logging.WARNING)
    for _ in range(9):
        now[0] += 2
        journal.write(b"line")
    assert [record.message for record in caplog.records] == [
        "the routing journal /dev/full ends here: No space left on device; serving goes on"
    ]


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
