"""How many cameras one machine answers in real time, by frame rate and number of heads per frame.

`vlora serve` runs the embedded model; the cameras are rendered here and send their frames over RPyC at a fixed rate
(an open loop), and several heads of different adapters answer each. A number of cameras passes if nothing is dropped,
lost or failed, and the 99th percentile of the time from a frame's due time to the arrival of its result is within the
frame's deadline, 1 / fps. The cameras share the processor with the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import itertools
import math
import os
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.plots import Picture
from fusion.embedded import checkpoint_path
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal, Row
from vlora.bench.serve.server_process import HEAD, ServerProcess, served, write_embedded_adapter
from vlora.client import AsyncClient, AsyncFrameStream
from vlora.engine.host_resources import default_threads
from vlora.errors import VLoraError
from vlora.models.processing import InputProcessor
from vlora.simulator.measures import percentile

Kind = Literal["ordinary", "activated"]

_INVOCATION = "what shape"  # the first words of the question: everything before it is shared


def adapter_name(kind: Kind, number: int) -> str:
    return f"{kind}-{number}"


def write_adapters(folder: Path, number: int = 4) -> None:
    """Write adapters of each kind with random factors, on every linear layer of the language model."""
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    invocation = InputProcessor.from_pretrained(checkpoint_path()).tokenizer.encode(_INVOCATION)
    random: dict[str, Any] = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    for place in range(number):
        write_embedded_adapter(folder / f"ordinary-{place}", place, **random)
        write_embedded_adapter(folder / f"activated-{place}", place, **random, alora_invocation_tokens=[*invocation])


_WIDTH, _HEIGHT = 320, 240
_SQUARE = 48
_ANSWER_S, _ANSWER_DEADLINES = 2.0, 4  # to wait for the last results of a trial, in seconds and in deadlines


@dataclasses.dataclass(frozen=True)
class Trial:
    cameras: int  # number of cameras
    fps: float  # frames per second of each
    frames: int  # frames that each sends
    heads: tuple[tuple[str, str], ...]  # adapter and head of each task


@dataclasses.dataclass
class Observed:
    """The frames of a trial. latencies_s: from the time at which each answered frame was due to its result."""

    latencies_s: list[float] = dataclasses.field(default_factory=list)
    sent: int = 0
    dropped: int = 0  # a newer one replaced them on the server
    failed: int = 0  # with an error, or with an error of one of their answers
    lost: int = 0  # sent without exactly one result in order, and results of no frame
    cut: int = 0  # cameras that were so far behind that they were stopped
    unanswered: int = 0  # sent by stopped cameras after the last one with a result; they are not `lost`

    @property
    def answered(self) -> int:
        return len(self.latencies_s)

    def percentile_s(self, percent: float) -> float:
        """A latency; infinite if nothing was answered."""
        return percentile(self.latencies_s, percent) if self.latencies_s else float("inf")

    def add(self, other: Observed) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def missed(self, fps: float) -> str | None:
        """Why these cameras are not answered in real time; None if they are."""
        counts = {"lost": self.lost, "failed": self.failed, "dropped": self.dropped, "cameras far behind": self.cut}
        if any(counts.values()):
            return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if (p99 := self.percentile_s(99)) > 1 / fps:
            return f"p99 {p99 * 1e3:.0f} ms"
        return None


async def observe(client: AsyncClient, trial: Trial, draws: Iterator[int], patience_s: float | None = None) -> Observed:
    """Run a trial. Frames of a camera are sent at equal distances, and those of all cameras in turn."""
    pictures = await asyncio.to_thread(_pictures, trial, draws)  # other clients of the process go on
    streams = await asyncio.gather(*(client.open_stream(heads=trial.heads) for _ in range(trial.cameras)))
    observed = Observed()
    began = asyncio.get_running_loop().time() + 0.1
    work = [
        asyncio.create_task(_watch(stream, own, began + place / trial.cameras / trial.fps, trial, observed))
        for place, (stream, own) in enumerate(zip(streams, pictures, strict=True))
    ]
    patience_s = _ANSWER_S + _ANSWER_DEADLINES / trial.fps if patience_s is None else patience_s
    done, late = await asyncio.wait(work, timeout=trial.frames / trial.fps + patience_s)
    observed.cut = len(late)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    await asyncio.gather(*(stream.close() for stream in streams))
    return observed


async def _watch(
    stream: AsyncFrameStream, pictures: Sequence[bytes], first_s: float, trial: Trial, observed: Observed
) -> None:
    """Send a camera's frames, and read their results."""
    loop = asyncio.get_running_loop()
    due = [first_s + number / trial.fps for number in range(len(pictures))]

    sent = 0

    async def send() -> None:
        nonlocal sent
        for at, picture in zip(due, pictures, strict=True):
            await asyncio.sleep(at - loop.time())
            sent += 1
            await stream.send(picture)
        await stream.end()

    sending = asyncio.create_task(send())
    numbers: list[int] = []
    expected = len(pictures)
    try:
        async for result in stream:
            now = loop.time()
            numbers.append(result.number)
            if result.dropped is not None:
                observed.dropped += 1
            elif result.error is not None or any(answer.error is not None for answer in result.answers):
                observed.failed += 1
            else:
                observed.latencies_s.append(now - due[result.number])
        await sending
    except VLoraError:
        pass
    except asyncio.CancelledError:
        expected = min(sent, len(numbers))
        observed.unanswered += sent - expected
        raise
    finally:
        sending.cancel()
        observed.sent += sent
        observed.lost += num_lost(numbers, expected)


def num_lost(numbers: Sequence[int], expected: int) -> int:
    """Frames without exactly one result in order, and results of no frame."""
    right = sum(got == number for got, number in zip(numbers, range(expected), strict=False))
    return expected - right + max(0, len(numbers) - expected)


def _pictures(trial: Trial, draws: Iterator[int]) -> list[list[bytes]]:
    return [
        [_picture(camera, number, next(draws)) for number in range(trial.frames)] for camera in range(trial.cameras)
    ]


def _picture(camera: int, number: int, seed: int) -> bytes:
    """A square that moves over smooth colors, as JPEG."""
    draws = np.random.default_rng(seed)
    coarse = Image.fromarray(draws.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    picture = coarse.resize((_WIDTH, _HEIGHT), Image.Resampling.BILINEAR)
    square = Image.new("RGB", (_SQUARE, _SQUARE), tuple(int(part) for part in draws.integers(0, 255, 3)))
    picture.paste(square, ((7 * number + 31 * camera) % (_WIDTH - _SQUARE), 40 * camera % (_HEIGHT - _SQUARE)))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=85)
    return stream.getvalue()


_RESOLUTION = 0.06  # of the number of cameras
_STEP = 1.25


class Capacity(NamedTuple):
    cameras: int  # the largest number that passed; 0 if one camera did not
    passed: Observed | None  # observations of these; None if `cameras` is 0
    above: int | None  # the smallest number that did not pass; None if the largest possible number passed
    refused: Observed | None  # observations of that number


async def largest(attempt: Callable[[int], Awaitable[Observed]], fps: float, guess: int, most: int) -> Capacity:
    """The largest number of cameras without a miss: from a guess in growing steps to a bracket, then by bisection."""
    low, high = 0, most + 1
    passed: Observed | None = None
    refused: Observed | None = None
    trying = max(1, min(guess, most))
    while high - low > max(1, int(_RESOLUTION * low)):
        observed = await attempt(trying)
        if observed.missed(fps) is None:
            low, passed = trying, observed
        else:
            high, refused = trying, observed
        if refused is None:
            trying = min(most, max(low + 1, math.ceil(low * _STEP)))
        elif passed is None:
            trying = max(1, math.floor(high / _STEP))
        else:
            trying = (low + high) // 2
    return Capacity(low, passed, None if refused is None else high, refused)


FPS, _FPS_QUICK = (5.0, 2.0, 1.0), (5.0,)
TASKS, _TASKS_QUICK = (1, 2, 4), (1, 4)
_SECONDS, _SECONDS_QUICK = 4.0, 2.5  # of a trial
_DEADLINES = 8  # a trial is at least this many frame deadlines long, so that a growing backlog exceeds them
_MOST_CAMERAS = 256
_GUESS = 0.8  # of the frames per second without a deadline
_WARM_FRAMES = 30
_LOADING_S = 60.0
_FLAGS = ("--dtype", "float32", "--max-streams", str(2 * _MOST_CAMERAS), "--max-requests", str(16 * _MOST_CAMERAS))


def measure_all(quick: bool) -> Measured:
    """Cameras by frame rate, heads per frame, and kind of adapters, on all cores and on one thread; some ten minutes.
    quick: one frame rate, and all cores only.
    """
    every = default_threads()
    rows: list[dict[str, Any]] = []
    totals = Observed()
    with tempfile.TemporaryDirectory() as temporary:
        write_adapters(Path(temporary))
        draws = itertools.count()
        for threads in (every,) if quick or every == 1 else (every, 1):
            with served("--adapters", temporary, "--threads", str(threads), *_FLAGS) as server:
                rows += asyncio.run(measure(server, threads, quick, totals, draws))
    goals = [
        Goal("frames without exactly one result, in all trials", float(totals.lost), 0.0, True),
        Goal("frames that failed, in all trials", float(totals.failed), 0.0, True),
    ]
    found = {
        "sent": totals.sent,
        "answered": totals.answered,
        "dropped": totals.dropped,
        "unanswered when cameras were stopped": totals.unanswered,
        "load average": [round(each, 2) for each in os.getloadavg()],
    }
    return Measured(rows, found, goals)


def pictures(rows: Sequence[Row]) -> dict[str, Picture]:
    panel = {
        "kind": "lines",
        "each": ["threads"],
        "title": "{threads} threads",
        "x": "fps",
        "y": "cameras",
        "name": "{tasks}, {adapters}",
        "ticked": True,
        "log": "y",
        "settings": {"xlabel": "fps", "ylabel": "cameras"},
    }
    title = "cameras with p99 within 1 / fps, nothing dropped, by tasks and kind of adapters"
    return {"cameras": Picture(rows, [panel], title)}


BENCH = Bench(name="streams", measure=measure_all, pictures=pictures)


class Trials:
    """Trials on one server, and the sum of what all of them observed."""

    def __init__(self, client: AsyncClient, totals: Observed, draws: Iterator[int]) -> None:
        self._client, self._totals, self._draws = client, totals, draws

    async def run(self, trial: Trial, patience_s: float | None = None) -> Observed:
        observed = await observe(self._client, trial, self._draws, patience_s)
        if patience_s is not None:  # without a result by then, a frame is lost
            observed.lost, observed.unanswered = observed.lost + observed.unanswered, 0
        self._totals.add(observed)
        return observed

    async def of(self, trial: Trial, cameras: int) -> Observed:
        """Another number of cameras."""
        return await self.run(dataclasses.replace(trial, cameras=cameras))

    async def tokens_per_frame(self, heads: tuple[tuple[str, str], ...]) -> float:
        """Tokens computed for a frame: those that its heads do not share. Adapters are loaded before it is counted."""
        counted = []
        for _ in range(2):
            before = (await self._client.stats()).num_computed_tokens
            observed = await self.run(Trial(1, 1.0, 1, heads), _LOADING_S)
            counted.append(((await self._client.stats()).num_computed_tokens - before) / max(1, observed.answered))
        return counted[-1]

    async def saturated(self, heads: tuple[tuple[str, str], ...]) -> float:
        """Frames per second of a few cameras that send much faster than they are answered: a first guess."""
        started = time.perf_counter()
        observed = await self.run(Trial(4, 20.0, _WARM_FRAMES, heads))
        return max(1.0, observed.answered / (time.perf_counter() - started))


async def measure(
    server: ServerProcess, threads: int, quick: bool, totals: Observed, draws: Iterator[int]
) -> list[dict[str, Any]]:
    """The rows of one number of threads."""
    rows = []
    async with AsyncClient(port=server.rpyc_port, timeout_s=60.0) as client:
        trials = Trials(client, totals, draws)
        for tasks in _TASKS_QUICK if quick else TASKS:
            # One head shares nothing with others, so that both kinds compute the same.
            kinds: tuple[Kind, ...] = ("ordinary", "activated") if tasks > 1 else ("ordinary",)
            for kind in kinds:
                heads = tuple((adapter_name(kind, number), HEAD) for number in range(tasks))
                tokens = await trials.tokens_per_frame(heads)
                rate = await trials.saturated(heads)
                for fps in _FPS_QUICK if quick else FPS:
                    frames = math.ceil(max(_SECONDS_QUICK if quick else _SECONDS, _DEADLINES / fps) * fps)
                    attempt = functools.partial(trials.of, Trial(1, fps, frames, heads))
                    capacity = await largest(attempt, fps, round(_GUESS * rate / fps), _MOST_CAMERAS)
                    rate = max(capacity.cameras, 1) * fps / _GUESS
                    rows.append(_row(threads, tasks, kind, fps, capacity) | {"tokens/frame": tokens})
    return rows


def _row(threads: int, tasks: int, kind: Kind, fps: float, capacity: Capacity) -> dict[str, Any]:
    shown = capacity.passed or capacity.refused
    assert shown is not None, "at least one number was tried"
    missed = None if capacity.refused is None else f"{capacity.above}: {capacity.refused.missed(fps)}"
    return {
        "threads": threads,
        "tasks": tasks,
        "adapters": kind,
        "fps": fps,
        "cameras": capacity.cameras,
        "answers/s": capacity.cameras * fps * tasks,
        "p50 ms": shown.percentile_s(50) * 1e3,
        "p99 ms": shown.percentile_s(99) * 1e3,
        "deadline ms": 1e3 / fps,
        "sent": shown.sent,
        "answered": shown.answered,
        "dropped": shown.dropped,
        "lost": shown.lost,
        "not": missed,
    }
