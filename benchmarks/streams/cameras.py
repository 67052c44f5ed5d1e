"""Rendered cameras that send frames at a fixed rate, whether or not earlier frames are answered."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from benchmarks.embedded_server import write_embedded_adapter
from fusion.embedded import checkpoint_path
from vlora.bench.timing import percentile
from vlora.client import AsyncClient, AsyncFrameStream
from vlora.errors import VLoraError
from vlora.models import InputProcessor

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
    """Cameras of one trial."""

    cameras: int  # number of cameras
    fps: float  # frames per second of each
    frames: int  # frames that each sends
    heads: tuple[tuple[str, str], ...]  # adapter and head of each task


@dataclasses.dataclass
class Observed:
    """The observations of the cameras of a trial.

    Attributes:
        latencies_s: From the time at which each answered frame was due to the arrival of its result.
        sent: Frames sent.
        dropped: Frames that a newer one replaced on the server.
        failed: Frames with an error, or with an error of one of their answers.
        lost: Frames sent without exactly one result in order, and results of no frame.
        cut: Cameras that were so far behind that they were stopped.
        unanswered: Frames that stopped cameras sent after the last one with a result; they are not `lost`.
    """

    latencies_s: list[float] = dataclasses.field(default_factory=list)
    sent: int = 0
    dropped: int = 0
    failed: int = 0
    lost: int = 0
    cut: int = 0
    unanswered: int = 0

    @property
    def answered(self) -> int:
        return len(self.latencies_s)

    def percentile_s(self, percent: float) -> float:
        """A latency; infinite if nothing was answered."""
        return percentile(self.latencies_s, percent) if self.latencies_s else float("inf")

    def add(self, other: Observed) -> None:
        """Add the observations of other cameras."""
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
