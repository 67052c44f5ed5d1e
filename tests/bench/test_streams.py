"""The bench of streams: searches for the number of cameras, and counts every frame once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import psutil
import pytest

from benchmarks import streams
from benchmarks.streams import Capacity, Observed, Trial, largest, num_lost, observe
from tests.server.running import Running, running_server
from vlora.bench.serve.server_process import ServerProcess
from vlora.client import AsyncClient
from vlora.client.frame_stream import AsyncFrameStream
from vlora.client.values import FrameResult

FPS = 2.0
HEADS = (("cam", "night"), ("zoo", "night"))


def search(capacity: int, guess: int, most: int = 256) -> tuple[Capacity, list[int]]:
    """Search for a known capacity; also the numbers that were tried."""
    tried: list[int] = []

    async def attempt(cameras: int) -> Observed:
        tried.append(cameras)
        latency_s = 0.4 if cameras <= capacity else 0.6
        return Observed(latencies_s=[latency_s] * 10, sent=10)

    return asyncio.run(largest(attempt, FPS, guess, most)), tried


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 20, 33, 100])
@pytest.mark.parametrize("guess", [1, 8, 40, 200])
def test_the_search_ends_at_the_capacity(capacity: int, guess: int) -> None:
    found, tried = search(capacity, guess)
    assert found.cameras <= capacity < (found.above or 0)
    assert capacity - found.cameras <= 0.06 * capacity and len(tried) == len(set(tried)) <= 26
    assert found.passed is not None and found.passed.percentile_s(99) == 0.4
    assert found.refused is not None and found.refused.missed(FPS) == "p99 600 ms"


def test_the_search_ends_without_any_camera_and_with_all() -> None:
    none, _ = search(0, 10)
    assert (none.cameras, none.passed, none.above) == (0, None, 1)
    every, _ = search(500, 10, most=20)
    assert (every.cameras, every.above, every.refused) == (20, None, None)


def test_a_miss_is_named() -> None:
    good = [0.1] * 99
    assert Observed(latencies_s=[*good, 0.6]).missed(FPS) is None
    assert Observed(latencies_s=[*good, 0.6, 0.6]).missed(FPS) == "p99 600 ms"
    assert Observed(latencies_s=good, dropped=1).missed(FPS) == "1 dropped"
    assert Observed(latencies_s=good, lost=2, failed=1).missed(FPS) == "2 lost, 1 failed"
    assert Observed().missed(FPS) == "p99 inf ms"


def observed(running: Running, trial: Trial) -> Observed:
    async def run() -> Observed:
        async with AsyncClient(port=running.port) as client:
            return await observe(client, trial, itertools.count())

    return asyncio.run(run())


def test_every_frame_of_every_camera_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server({"cam": {"night": 1}, "zoo": {"night": 1}}) as running:
        found = observed(running, Trial(3, 10.0, 8, HEADS))
        assert (found.sent, found.answered, found.dropped, found.lost, found.failed, found.cut) == (24, 24, 0, 0, 0, 0)
        assert 0 < found.percentile_s(50) <= found.percentile_s(99) < 5

        ask = running.front_end.ask_head

        async def ask_slowly(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.4)  # a stream has four frames in work: ten per second
            return await ask(*args, **options)

        monkeypatch.setattr(running.front_end, "ask_head", ask_slowly)
        slow = observed(running, Trial(1, 40.0, 40, HEADS))
        assert slow.sent == 40 == slow.answered + slow.dropped and slow.dropped > 5 and slow.lost == 0


def test_a_lost_result_and_a_failed_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read = AsyncFrameStream.__anext__

    async def forgetful(stream: AsyncFrameStream) -> FrameResult:
        result = await read(stream)
        return await read(stream) if result.number == 3 else result

    with running_server({"cam": {"night": 1}, "zoo": {"night": 1}}) as running:
        monkeypatch.setattr(AsyncFrameStream, "__anext__", forgetful)
        found = observed(running, Trial(2, 20.0, 6, HEADS))
        assert found.lost > 0 and found.missed(FPS) == f"{found.lost} lost"
        monkeypatch.setattr(AsyncFrameStream, "__anext__", read)

        ask = running.front_end.ask_head

        async def fail_one(images: Any, adapter: str, *args: Any, **options: Any) -> Any:
            return await ask(images, "nowhere" if adapter == "zoo" else adapter, *args, **options)

        monkeypatch.setattr(running.front_end, "ask_head", fail_one)
        assert observed(running, Trial(1, 20.0, 4, HEADS)).failed == 4, "one of two answers is an error"


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [([0, 1, 2, 3], 0), ([0, 1, 2], 1), ([0, 2, 3], 3), ([0, 1, 2, 3, 3], 1), ([1, 0, 2, 3], 2), ([], 4)],
)
def test_results_out_of_order_and_surplus_ones_are_lost(numbers: list[int], lost: int) -> None:
    assert num_lost(numbers, 4) == lost


@pytest.mark.parametrize(("swallowed", "lost"), [(3, 0), (1, 2)])
def test_a_stopped_camera_counts_its_frames(monkeypatch: pytest.MonkeyPatch, swallowed: int, lost: int) -> None:
    """The result of one frame never arrives, so the stream does not end by itself."""
    read = AsyncFrameStream.__anext__
    ended = asyncio.Event()

    async def swallow(stream: AsyncFrameStream) -> FrameResult:
        try:
            result = await read(stream)
            return await read(stream) if result.number == swallowed else result
        except StopAsyncIteration:
            await ended.wait()
            raise

    monkeypatch.setattr(AsyncFrameStream, "__anext__", swallow)
    with running_server({"cam": {"night": 1}, "zoo": {"night": 1}}) as running:

        async def run() -> Observed:
            async with AsyncClient(port=running.port) as client:
                return await observe(client, Trial(1, 10.0, 4, HEADS), itertools.count(), patience_s=1.0)

        found = asyncio.run(run())
    assert (found.sent, found.cut, found.unanswered, found.lost) == (4, 1, 1, lost)


def test_rows_of_a_server_that_answers_all_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"_MOST_CAMERAS": 3, "_FPS_QUICK": (1.0,), "_SECONDS_QUICK": 1.0, "_DEADLINES": 1, "_WARM_FRAMES": 2}
    for name, value in small.items():
        monkeypatch.setattr(streams, name, value)
    adapters = {f"{kind}-{number}": {"kind": 1} for kind in ("ordinary", "activated") for number in range(4)}
    totals = Observed()
    with running_server(adapters) as running:
        server = ServerProcess(running.port, 0, psutil.Process())
        rows = asyncio.run(streams.measure(server, 1, True, totals, itertools.count()))
    assert [(row["tasks"], row["adapters"]) for row in rows] == [(1, "ordinary"), (4, "ordinary"), (4, "activated")]
    for row in rows:
        assert (row["cameras"], row["not"], row["sent"], row["answers/s"]) == (3, None, 3, 3 * row["tasks"])
        assert (row["answered"], row["dropped"], row["lost"]) == (3, 0, 0) and row["p99 ms"] < row[
            "deadline ms"
        ] == 1000
    assert totals.answered == totals.sent >= 9
