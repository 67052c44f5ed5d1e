"""What rank 0 learns from the reports and the ends of the other ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.rank_reports import RankReports
from vlora.errors import EngineDead, StepFailed
from vlora.types import ErrorValue


def test_the_dead_rank_is_the_cause_regardless_of_message_order() -> None:
    """Rank 1 ends because it waited for rank 2, and its message arrives first."""
    reports = RankReports()
    follows = messages.RankFailed(ErrorValue.of(EngineDead("rank 2 is gone")), follows=True)
    ends: list[Connection] = []
    threads = []
    for rank, code in ((1, 1), (2, -signal.SIGKILL)):
        here, there = Pipe()
        ends.append(there)
        process: Any = SimpleNamespace(join=lambda: None, exitcode=code)
        threads.append(threading.Thread(target=reports.listen, args=(rank, here, process)))
        threads[-1].start()
    ends[0].send_bytes(messages.encode(follows))
    ends[0].close()
    time.sleep(0.1)
    ends[1].close()
    for thread in threads:
        thread.join()
    with pytest.raises(EngineDead, match="rank 2 was killed by SIGKILL"):
        reports.check()
    assert os.read(reports.alarm, 1)
    reports.close()
    # Without another cause it is reported.
    reports = RankReports()
    here, there = Pipe()
    there.send_bytes(messages.encode(follows))
    there.close()
    reports.listen(1, here, SimpleNamespace(join=lambda: None, exitcode=1))  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="rank 2 is gone"):
        reports.check()
    reports.close()


def test_a_read_is_done_when_every_rank_has_reported_it() -> None:
    """A failure is reported after the last rank too: a later report would count for the next attempt."""
    reports = RankReports()
    read, failed, pending = (reports.expect_read(key, (1, 2)) for key in ("read", "failed", "pending"))
    ends: list[Connection] = []
    threads = []
    process: Any = SimpleNamespace(join=lambda: None, exitcode=1)
    for rank in (1, 2):
        here, there = Pipe()
        ends.append(there)
        threads.append(threading.Thread(target=reports.listen, args=(rank, here, process)))
        threads[-1].start()
    for end, error in zip(ends, (ErrorValue.of(StepFailed("no such file")), None), strict=True):
        time.sleep(0.1)
        assert not read.done() and not failed.done()
        for message in (messages.AdapterRead("read"), messages.AdapterRead("failed", error)):
            end.send_bytes(messages.encode(message))
    assert read.result(10) is None
    with pytest.raises(StepFailed, match="rank 1: no such file"):
        failed.result(10)
    for end in ends:
        end.close()
    for thread in threads:
        thread.join()
    with pytest.raises(EngineDead, match=r"rank \d ended with exit code 1"):
        pending.result(10)
    reports.close()
