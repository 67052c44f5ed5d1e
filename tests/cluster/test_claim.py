"""The claim of a replica's process, and its life without the process that started it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.running import SECRET, ReplicaProcess, run
from vlora.cluster import claim
from vlora.cluster.claim import RunningReplica
from vlora.cluster.door import connect
from vlora.errors import BadConfig

pytestmark = pytest.mark.slow

ALONE_S = 0.6


def holder(path: Path) -> subprocess.Popen[bytes]:
    """A process that holds a file until its stdin ends."""
    code = (
        "import sys; from vlora.cluster import claim\n"
        "file = claim.hold(sys.argv[1]); print(flush=True); sys.stdin.readline()\n"
        "claim.publish(file, claim.RunningReplica('h', 1, 2, 3)); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_claim_lasts_until_its_process_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "claim")
    assert claim.clear(path)
    with holder(tmp_path / "claim") as process:
        assert process.stdin is not None and process.stdout is not None
        assert not claim.clear(path) and claim.find(path) is None
        process.stdin.write(b"\n")
        process.stdout.readline()
        assert not claim.clear(path) and claim.find(path) == RunningReplica("h", 1, 2, 3)
        with pytest.raises(BadConfig, match=f"^another process is the replica of {path}; end it first$"):
            claim.hold(path)
        waiting = threading.Thread(target=claim.wait_released, args=(path,))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        process.kill()
        waiting.join(5)
        assert not waiting.is_alive()
    assert claim.find(path) == RunningReplica("h", 1, 2, 3)  # of a process that has ended
    assert claim.clear(path) and claim.find(path) is None


def test_a_replica_with_a_claim_ends_after_a_time_without_a_front_end(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "claim")
        replica = await ReplicaProcess.start(claim_file=path, alone_s=ALONE_S)
        found = claim.find(path)
        assert found is not None and (found.port, found.engine_pid) == (replica.address.port, replica.engine_pid)
        assert replica.process.stdin is not None
        replica.process.stdin.close()  # the process that has started it ends
        client = await connect(replica.address, SECRET, tls=False, beat_s=0.1)
        for _ in range(10):  # pings keep the line
            client.ping()
            await asyncio.sleep(ALONE_S / 5)
        assert replica.process.returncode is None and client.cause is None and not claim.clear(path)
        began_s = time.monotonic()
        await client.disconnect("the front end ends")
        assert await replica.wait_ended() == 0
        assert time.monotonic() - began_s >= ALONE_S * 0.9
        assert claim.clear(path)

    run(main())


def test_a_replica_that_no_front_end_ever_reaches_ends(tmp_path: Path) -> None:
    async def main() -> None:
        replica = await ReplicaProcess.start(claim_file=str(tmp_path / "claim"), alone_s=ALONE_S)
        assert await replica.wait_ended() == 0

    run(main())


def test_a_second_replica_with_the_same_claim_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "claim")
        replica = await ReplicaProcess.start(claim_file=path)
        with pytest.raises(AssertionError, match="another process is the replica of"):
            await ReplicaProcess.start(claim_file=path)
        assert replica.process.returncode is None
        replica.process.terminate()
        await replica.wait_ended()

    run(main())
