"""A client's frame stream through a front end with two replicas, one of which is killed under them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.running import Running, run
from tests.cluster.serving import serving
from tests.server.running import png
from tests.server.scripted import write_adapter
from vlora.client import Client, FrameResult

pytestmark = pytest.mark.slow

NUM_FRAMES = 60
HUNG_AT = 20  # one replica stops at this frame, with frames that it has accepted


def is_bright(number: int) -> bool:
    return number % 3 == 0


def frames_of(client: Client, hang: threading.Event) -> list[FrameResult]:
    """Send all frames; `hang` is set in the middle of them. Returns the results as they come."""
    results: list[FrameResult] = []
    with client.open_stream(adapter="cam", head="night", drop="none") as stream:

        def receive() -> None:
            results.extend(stream)

        receiving = threading.Thread(target=receive)
        receiving.start()
        for number in range(NUM_FRAMES):
            if number == HUNG_AT:
                hang.set()
            assert stream.send(png(230 if is_bright(number) else 20)) == number
            time.sleep(0.002)
        stream.end()
        receiving.join(20)
    return results


async def kill_under_frames(found: Running, hang: threading.Event) -> int:
    """Stop a replica, wait until it has frames, and kill it. Returns the number of its frames."""
    await asyncio.to_thread(hang.wait)
    found.replicas["a"].signal(signal.SIGSTOP)
    while not (frames := len(found.router.replicas["a"].holds)):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    found.replicas["a"].signal(signal.SIGKILL)
    return frames


def test_a_frame_stream_loses_no_frame_when_a_replica_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving("a", "b") as (found, front_end, port):
            await front_end.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
            hang = threading.Event()
            killing = asyncio.create_task(kill_under_frames(found, hang))

            def use() -> list[FrameResult]:
                with Client(port=port) as client:
                    return frames_of(client, hang)

            results = await asyncio.to_thread(use)
            assert await killing and found.cluster.status().num_resubmitted
            assert [result.number for result in results] == list(range(NUM_FRAMES))
            labels = [result.answer.label if result.answer is not None else result.error for result in results]
            assert labels == ["bright" if is_bright(number) else "dark" for number in range(NUM_FRAMES)]
            assert found.is_idle

    run(main())
