"""Orders to other ranks and their reports: each request once, with its first step; causes and ends of ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import TensorParallelRunner
from vlora.engine.tensor_parallel.messages import RankReports
from vlora.engine.tensor_parallel.worker import ShardLoader
from vlora.errors import EngineDead, StepFailed
from vlora.memory.adapter_cache import WorkerAdapterCache
from vlora.memory.page_allocator import PageRun
from vlora.types import Batch, BatchItem, ErrorValue, Mode, Request, StepResult


class RecordingCoordinator:
    """Records its orders. Its ranks live."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.reports = RankReports()

    def send_later(self, order: Callable[..., None], *arguments: object) -> None:
        self.orders.append((order.__name__, *arguments))

    def run(self, batch: Batch) -> None:
        self.orders.append(("run", batch))


class Runner:
    def add(self, request: Request, vision_key: str | None) -> None: ...

    def release(self, request_id: str) -> None: ...

    def run(self, batch: Batch) -> StepResult:
        return StepResult(tokens={item.request_id: 7 for item in batch.items})


def batch(*request_ids: str) -> Batch:
    items = tuple(BatchItem(request_id, None, 0, 1, (0,), True) for request_id in request_ids)
    return Batch(Mode.MERGED, None, items)


def test_a_request_is_sent_once_with_its_first_step() -> None:
    coordinator: Any = RecordingCoordinator()
    runner = TensorParallelRunner(coordinator, Runner())  # type: ignore[arg-type]
    requests = {name: Request(request_id=name, prompt_ids=(1,)) for name in ("runs", "refused", "later")}
    for request in requests.values():
        runner.add(request, None)
    runner.release("refused")
    assert coordinator.orders == []
    first, second = batch("runs"), batch("later", "runs")
    runner.run(first)
    runner.run(second)
    for request_id in ("runs", "unknown", "runs"):
        runner.release(request_id)
    assert coordinator.orders == [
        ("add", requests["runs"], None),
        ("run", first),
        ("take_tokens", {"runs": 7}),
        ("add", requests["later"], None),
        ("run", second),
        ("take_tokens", {"later": 7, "runs": 7}),
        ("release", "runs"),
    ]
    coordinator.reports.close()


class Listened:
    """Reports of ranks 1 and 2, each of which ends with an exit code when its connection does."""

    def __init__(self, *codes: int) -> None:
        self.reports = RankReports()
        self.ends: list[Connection] = []
        self.threads: list[threading.Thread] = []
        for rank, code in enumerate(codes, 1):
            here, there = Pipe()
            self.ends.append(there)
            process: Any = SimpleNamespace(join=lambda: None, exitcode=code)
            self.threads.append(threading.Thread(target=self.reports.listen, args=(rank, here, process)))
            self.threads[-1].start()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize(
    ("codes", "cause"), [((1, -signal.SIGKILL), "rank 2 was killed by SIGKILL"), ((1,), "rank 2 is gone")]
)
def test_the_dead_rank_is_the_cause_regardless_of_message_order(codes: tuple[int, ...], cause: str) -> None:
    """Rank 1 ends because it waited for rank 2, and its message arrives first. Without another cause it is reported."""
    listened = Listened(*codes)
    follows = messages.RankFailed(ErrorValue.of(EngineDead("rank 2 is gone")), follows=True)
    listened.ends[0].send_bytes(messages.encode(follows))
    listened.ends[0].close()
    time.sleep(0.1)
    listened.close()
    with pytest.raises(EngineDead, match=cause):
        listened.reports.check()
    assert os.read(listened.reports.alarm, 1)
    listened.reports.close()


def test_an_unreadable_report_is_the_end_of_its_rank() -> None:
    reports = RankReports()
    here, there = Pipe()
    there.send_bytes(b"\xc1")
    reports.listen(1, here, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="a report of rank 1 cannot be read"):
        reports.check()
    reports.close()


def test_a_read_is_done_when_every_rank_has_reported_it() -> None:
    """A failure is reported after the last rank too: a later report would count for the next attempt."""
    listened = Listened(1, 1)
    read, failed, pending = (listened.reports.expect_read(key, (1, 2)) for key in ("read", "failed", "pending"))
    for end, error in zip(listened.ends, (ErrorValue.of(StepFailed("no such file")), None), strict=True):
        time.sleep(0.1)
        assert not read.done() and not failed.done()
        for message in (messages.AdapterRead("read"), messages.AdapterRead("failed", error)):
            end.send_bytes(messages.encode(message))
    assert read.result(10) is None
    with pytest.raises(StepFailed, match="rank 1: no such file"):
        failed.result(10)
    listened.close()
    with pytest.raises(EngineDead, match=r"rank \d ended with exit code 1"):
        pending.result(10)
    listened.reports.close()


def test_a_failed_copy_to_the_device_ends_the_rank() -> None:
    """It failed on this rank only: rank 0 knows that the files were read, and uses the adapter in the next step."""
    loads: list[object] = []
    pool: Any = SimpleNamespace(load=loads.append, resident=frozenset())
    adapter: Any = "adapter"
    reports: list[messages.AdapterRead] = []
    with ThreadPoolExecutor(1) as executor:
        shards = ShardLoader(pool, WorkerAdapterCache(), reports.append, executor)
        shards.start("a", lambda: adapter, PageRun(0, 1))
    assert reports == [messages.AdapterRead("a")]
    with pytest.raises(EngineDead, match="adapter 'a' was read, but could not be copied to this rank's device"):
        shards.load_read()
    assert loads == [adapter]
