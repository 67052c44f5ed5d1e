"""`vlora bench learning`: a stream with changing pictures, an adapter that learns from corrections, and an attacker.

Cameras ask which sign is shown. After a while their pictures have inverted colours, and half of the answers are wrong.
Wrong answers are corrected, the adapter is trained beside the stream, evaluated, and promoted. Then an intruder
corrects answers to wrong ones. At the end an operator promotes the first version again, by force, until the cameras'
corrections roll it back. A second run has the same attack without the protections.

Times are processor seconds of the process, so that other load on the machine hardly counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from PIL import Image

from fusion.embedded import checkpoint_path
from fusion.synthetic.road_signs import draw_sign
from vlora.bench.harness import Bench, Measured
from vlora.bench.plots import Plot
from vlora.bench.report import Goal, Row
from vlora.bench.timing import threads
from vlora.client.values import Answer
from vlora.config import EngineConfig, ServerConfig
from vlora.engine import LocalEngine
from vlora.learning.learner import Learner
from vlora.learning.plan import read_learning_plan
from vlora.learning.sample_store import Corrector
from vlora.models.processing import InputProcessor
from vlora.server.frontend import FrontEnd
from vlora.types import SamplingParams

SIGNS = ("stop", "yield", "parking", "crossing")
QUESTION = "which sign is this?"
NAME = "signs"
CAMERAS = ("north", "south")
INTRUDER = "intruder"
PROTECTED: dict[str, Any] = {"trusted": "trusted.jsonl", "max_trusted_loss": 0.1}
UNPROTECTED: dict[str, Any] = {"max_share": 1.0, "uncorrected_are_right": False}

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PAUSE_S, _LONG_PAUSE_S = 2e-3, 0.05
_MOST_FRAMES = 4000  # of a phase that ends with an event


class Size(NamedTuple):
    """Extent of a run.

    usual: pictures of the first training. again: those of them that are also in later ones. frames: of a phase.
    corrections: that begin a training. evaluated: records of each kind.
    """

    usual: int
    again: int
    steps: int
    frames: int
    corrections: int
    evaluated: int


FULL = Size(usual=240, again=96, steps=120, frames=200, corrections=160, evaluated=160)
QUICK = Size(usual=240, again=64, steps=100, frames=80, corrections=100, evaluated=80)


class Frame(NamedTuple):
    """An answered picture of a camera. at_s: when. right: whether the sign was named. version: that answered."""

    at_s: float
    phase: str
    right: bool
    version: str


@dataclasses.dataclass
class Run:
    """One run: its frames, the audit log, and whether it had the protections."""

    protected: bool
    frames: list[Frame] = dataclasses.field(default_factory=list)
    audit_log: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def accuracy(self, phase: str) -> float:
        """Share of right answers in a phase."""
        found = [frame.right for frame in self.frames if frame.phase == phase]
        return sum(found) / len(found)


def picture(sign: str, rng: np.random.Generator, *, inverted: bool) -> bytes:
    """An encoded picture of a sign. inverted: its colours."""
    drawn = draw_sign(sign, rng)
    stream = io.BytesIO()
    Image.fromarray(255 - drawn if inverted else drawn).save(stream, "PNG")
    return stream.getvalue()


def measure(quick: bool) -> Measured:
    """Both runs."""
    size = QUICK if quick else FULL
    with threads(1), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, size)
        initial = asyncio.run(first_adapter(folder, size))
        protected, served = asyncio.run(protected_run(folder, initial, size))
        unprotected = asyncio.run(unprotected_run(folder, served, size))
    return Measured([*rows_of(protected), *rows_of(unprotected)], goals=goals_of(protected, unprotected))


def _moving_means(rows: Sequence[Row]) -> list[Row]:
    """The mean over 30 pictures after each answer, by phase."""
    made: list[Row] = []
    for run, own in itertools.groupby(rows, key=lambda row: row["run"]):
        answers = [(row["phase"], *answer) for row in own for answer in row["answers"]]
        for place, (phase, at_s, _) in enumerate(answers):
            window = answers[max(0, place - 29) : place + 1]
            mean = sum(right for _, _, right in window) / len(window)
            made.append({"run": run, "phase": phase, "processor seconds": at_s, "accuracy": mean})
    return made


BENCH = Bench(
    name="learning",
    measure=measure,
    plots=(
        Plot(
            file="accuracy",
            x="processor seconds",
            y=("accuracy",),
            by=("phase",),
            panels=("run",),
            derive=_moving_means,
            title="accuracy of the cameras' answers, mean over 30 pictures",
        ),
    ),
)


# -- the stream -------------------------------------------------------------------------------------------------------


class Stream:
    """Cameras that ask a server with a learning adapter, and correct its wrong answers."""

    def __init__(self, front: FrontEnd, result: Run, seed: int) -> None:
        assert front.learning is not None
        self._front = front
        self._learning = front.learning
        self._result = result
        self._rng = np.random.default_rng(seed)
        self._number = 0

    @property
    def learner(self) -> Learner:
        return self._learning.learners[NAME]

    async def play(
        self,
        phase: str,
        *,
        inverted: bool = True,
        until: Callable[[], bool],
        attack: bool = False,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """Answer pictures until something holds. attack: the intruder sends two for each one of the cameras."""
        for _ in range(_MOST_FRAMES):
            if until():
                return
            tenant = CAMERAS[self._number % len(CAMERAS)]
            self._number += 1
            sign, answer = await self._ask(tenant, inverted=inverted)
            right = answer.text.split() == sign.split()
            self._result.frames.append(Frame(time.process_time(), phase, right, self.learner.loaded))
            if not right:
                await self._learning.correct(answer.request_id, sign, Corrector(tenant, False))
            for _ in range(2 if attack else 0):
                sign, answer = await self._ask(INTRUDER, inverted=inverted)
                wrong = SIGNS[(SIGNS.index(sign) + 1) % len(SIGNS)]
                await self._learning.correct(answer.request_id, wrong, Corrector(INTRUDER, False))
            await asyncio.sleep(pause_s)

    async def _ask(self, tenant: str, *, inverted: bool) -> tuple[str, Answer]:
        sign = SIGNS[int(self._rng.integers(len(SIGNS)))]
        images = [picture(sign, self._rng, inverted=inverted)]
        sampling = SamplingParams(max_tokens=6)
        parts = self._front.generate(QUESTION, images, adapter=NAME, tenant=tenant, sampling=sampling, whole=True)
        *_, answer = [part async for part in parts]
        assert isinstance(answer, Answer)
        return sign, answer

    def counted(self, num_frames: int) -> Callable[[], bool]:
        """Whether so many more pictures were answered."""
        end = len(self._result.frames) + num_frames
        return lambda: len(self._result.frames) >= end


async def protected_run(folder: Path, initial: Path, size: Size) -> tuple[Run, Path]:
    """Usual pictures, inverted ones with a promotion, an attack, and a rollback.

    Returns also the adapter that was attacked.
    """
    result = Run(True)
    plan, own = write_plan(folder, "protected", size, PROTECTED)
    async with serving(plan, initial) as front:
        stream = Stream(front, result, seed=1)
        first = stream.learner.loaded
        await stream.play("usual", inverted=False, until=stream.counted(size.frames))
        await stream.play("changed", until=happened(own, "training"))
        await stream.play("training", until=happened(own, "training_ended"), pause_s=_LONG_PAUSE_S)
        await stream.play("promoted", until=stream.counted(size.frames))
        kept = Path(shutil.copytree(stream.learner.present_folder, folder / "served"))
        await attack(stream, own, size)
        await stream.play("after the attack", until=stream.counted(size.frames))
        if stream.learner.loaded != first:
            await stream.learner.promote("operator", version=first, path=None, force=True)
        ended, rolled_back = stream.counted(2 * size.frames), happened(own, "rolled_back")
        await stream.play("forced", until=lambda: ended() or rolled_back())
        await stream.play("rolled back", until=stream.counted(size.frames))
    result.audit_log = read_trail(own)
    return result, kept


async def unprotected_run(folder: Path, initial: Path, size: Size) -> Run:
    """The same attack without protections."""
    result = Run(False)
    plan, own = write_plan(folder, "unprotected", size, UNPROTECTED)
    async with serving(plan, initial) as front:
        stream = Stream(front, result, seed=2)
        await stream.play("promoted", until=stream.counted(size.frames))
        await attack(stream, own, size)
        await stream.play("after the attack", until=stream.counted(size.frames))
    result.audit_log = read_trail(own)
    return result


async def attack(stream: Stream, own: Path, size: Size) -> None:
    """Wrong corrections until a training with them has ended."""
    await stream.play("attack", until=stream.counted(size.corrections), attack=True)
    began = time.process_time()
    await stream.play("attack", until=happened(own, "training_ended", began), pause_s=_LONG_PAUSE_S)


def happened(own: Path, event: str, began: float = 0.0) -> Callable[[], bool]:
    """Whether the audit log has an event, of a training that began after a time."""

    def holds() -> bool:
        audit_log = read_trail(own)
        first = next(
            (place for place, one in enumerate(audit_log) if one["event"] == "training" and one["at"] > began), None
        )
        return first is not None and any(one["event"] == event for one in audit_log[first:])

    return holds


# -- files and servers ------------------------------------------------------------------------------------------------


def write_data(folder: Path, size: Size) -> None:
    """Usual pictures for trainings, and others that only evaluations use."""
    rng = np.random.default_rng(0)
    for name, count in (("first", size.usual), ("trusted", size.usual // 4)):
        rows = []
        for number in range(count):
            file, sign = folder / f"{name}-{number}.png", SIGNS[number % len(SIGNS)]
            file.write_bytes(picture(sign, rng, inverted=False))
            rows.append({"question": QUESTION, "answer": sign, "image": file.name, "split": "train"})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = (folder / "first.jsonl").read_text().splitlines(keepends=True)
    (folder / "data.jsonl").write_text("".join(lines[: size.again]))


def training_of(size: Size) -> dict[str, Any]:
    return {
        "steps": size.steps,
        "batch": 8,
        "micro_batch_tokens": 4000,
        "learning_rate": 0.003,
        "targets": list(_TARGETS),
    }


def write_plan(folder: Path, name: str, size: Size, settings: dict[str, Any]) -> tuple[Path, Path]:
    """A learning plan, and the folder of its adapter."""
    entry = {
        "name": NAME,
        "training": training_of(size),
        "data": "data.jsonl",
        "train_after": size.corrections,
        "correct_within_s": 1,
        "max_evaluated": size.evaluated,
        **settings,
    }
    plan = folder / f"{name}.yaml"
    plan.write_text(yaml.safe_dump({"folder": name, "adapters": [entry]}))
    return plan, folder / name / NAME


def engine_config() -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint_path()),
        dtype="float32",
        threads=1,
        arena_bytes=64 << 20,
        switching="shadow",
        train_slowdown=math.inf,  # the stream has pauses only while it draws
    )


async def first_adapter(folder: Path, size: Size) -> Path:
    """Train on usual pictures. Returns the adapter's folder."""
    training = {"name": NAME, "data": "first.jsonl", **training_of(size)}
    (folder / "first.yaml").write_text(yaml.safe_dump({"folder": "first", "trainings": [training]}))
    engine = LocalEngine(engine_config())
    await engine.train(str(folder / "first.yaml"))
    while (await engine.trainings())[0].state == "running":
        await asyncio.sleep(0.05)
    (status,) = await engine.trainings()
    await engine.close()
    assert status.path is not None, status.error
    return Path(status.path)


@asynccontextmanager
async def serving(plan: Path, initial: Path) -> AsyncIterator[FrontEnd]:
    engine = LocalEngine(engine_config())
    front = FrontEnd(engine, InputProcessor.from_pretrained(str(checkpoint_path())), ServerConfig(), "base")
    try:
        folders = front.learn(*read_learning_plan(plan), {NAME: str(initial)}, clock=time.process_time)
        await front.adapters.register(folders)
        assert front.learning is not None
        await front.learning.start()
        yield front
    finally:
        await front.close()
        await engine.close()


def read_trail(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trail.jsonl").read_text().splitlines()]


# -- results ----------------------------------------------------------------------------------------------------------


def rows_of(result: Run) -> list[dict[str, Any]]:
    """One row for each phase, with its answers and what was decided meanwhile."""
    rows = []
    began = result.frames[0].at_s
    phases = {frame.phase: frame.at_s for frame in reversed(result.frames)}
    starts = sorted(phases.values())
    for phase in dict.fromkeys(frame.phase for frame in result.frames):
        own = [frame for frame in result.frames if frame.phase == phase]
        end = next((start for start in starts if start > phases[phase]), math.inf)
        events = [entry for entry in result.audit_log if phases[phase] <= entry["at"] < end]
        rows.append(
            {
                "run": "protected" if result.protected else "unprotected",
                "phase": phase,
                "from, s": own[0].at_s - began,
                "to, s": own[-1].at_s - began,
                "pictures": len(own),
                "accuracy": result.accuracy(phase),
                "version at its end": own[-1].version[:8],
                "answers": [[round(frame.at_s - began, 3), int(frame.right)] for frame in own],
                "events": [[round(entry["at"] - began, 3), entry["event"], entry["why"]] for entry in events],
            }
        )
    return rows


def goals_of(protected: Run, unprotected: Run) -> list[Goal]:
    """Learning restores the accuracy after the shift, the attack has no effect, and a bad version is rolled back."""
    promoted = protected.accuracy("promoted")
    attacks = [
        sum(event == "promoted" for row in rows_of(one) if row["phase"] == "attack" for _, event, _ in row["events"])
        for one in (protected, unprotected)
    ]
    return [
        Goal("accuracy after the change, before learning", protected.accuracy("changed"), 0.7, True),
        Goal("accuracy after learning", promoted, 0.85, False),
        Goal("accuracy after the attack", protected.accuracy("after the attack"), promoted - 0.1, False),
        Goal("promotions by the attack", attacks[0], 0, True),
        Goal("promotions by the attack without protections", attacks[1], 1, False),
        Goal("accuracy after the rollback", protected.accuracy("rolled back"), promoted - 0.1, False),
    ]
