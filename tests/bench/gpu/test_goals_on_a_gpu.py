"""The parts of the stages for a GPU, as far as a CPU runs them: a GPU's numbers of requests and rows on a small model,
the goals, and the clock. A mistake there would otherwise cost a GPU machine's time.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atmm.tuning import replays
from vlora.bench.dummy import small_config
from vlora.bench.gpu import models, profiling, timing
from vlora.bench.gpu.context import Context
from vlora.bench.gpu.paged_batch import Chunk, Heads
from vlora.bench.gpu.stages.serve import Load
from vlora.bench.report import Goal

CPU = torch.device("cpu")


class Immediate:
    """As Replays, without a graph."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self) -> float:
        started = time.perf_counter()
        self._call()
        return time.perf_counter() - started


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages take their paths for a GPU, with a small model on the CPU."""
    monkeypatch.setattr(Context, "on_gpu", True)
    monkeypatch.setattr(Context, "synchronize", lambda self: None)
    monkeypatch.setattr(timing, "Replays", Immediate)
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(models, "config_of", lambda context: small_config())
    monkeypatch.setattr(models, "ARENA_BYTES", 2**28)


SMALLER: dict[str, dict[str, Any]] = {
    "step": {"PROMPT": 16, "BATCHES": (32, 16, 1)},
    "prefill": {"TOKENS": 64, "SIDE": 4, "OTHER_SIDES": (6, 8)},
    "merge": {"ARENA_BYTES": 2**27, "SWITCHES": 3},
    "serve": {"MIXED": Load(8, 8, 12, 4), "STREAMS": Load(32, 8, 12, 6), "ARENA_BYTES": 2**28},
    "attention": {
        "HEADS": Heads(4, 2, 16),
        "CONTEXTS": (48, 2048),
        "CHUNKS": (Chunk(0, 32), Chunk(48, 32)),
        "CACHE_BYTES": 2**16,
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("stage", "goals"),
    [
        (
            "step",
            [
                "steps run as CUDA graphs",
                "merged step / bytes, batch 16",
                "unmerged 8 x r16 / merged",
                "unmerged 16 x r64",
                "mixed / merged",
                "host ms of a step, batch 32",
            ],
        ),
        (
            "prefill",
            ["prefill of 64 tokens, merged", "unmerged / merged", "one image", "the first image of a new size"],
        ),
        ("merge", ["merge / copy, rank 16", "back to W0", "first merge", "drift in place", "drift after a restore"]),
        ("serve", ["32 streams over 8 adapters", "burst / transformers + PEFT", "p99 / p50"]),
        ("attention", ["batch 32 x 2048, us", "batch 1 x 2048, us", "decode / torch over contiguous KV"]),
    ],
)
def test_goals_of_a_stage(stage: str, goals: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"vlora.bench.gpu.stages.{stage}")
    for name, value in SMALLER[stage].items():
        monkeypatch.setattr(module, name, value)
    if stage == "step":
        counted = profiling.Profile(launches=300, copies=2, busy_s=1e-4, top=[])
        monkeypatch.setattr(module, "profiled", lambda context, call: counted)
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "memory_gib", lambda context: 1.0, raising=False)
    result = module.run(Context(CPU, tmp_path, time.monotonic() + 200, lambda found: kept.append(dict(found))))
    found: list[Goal] = result["goals"]
    assert len(found) == len(goals)
    for goal, part in zip(found, goals, strict=True):
        assert part in goal.name and goal.value == goal.value, goal
    assert result["summary"] and kept


def test_a_step_stage_compares_the_same_batch() -> None:
    from vlora.bench.gpu.stages.step import KINDS, goals_of

    rows = [
        {
            "kind": kind.name,
            "batch": batch,
            "graph": graph,
            "ms": (2.0 if kind.name == "mixed" else 1.0) * batch,
            "host ms": (0.02 if kind.name == "mixed" else 0.01) * batch,
            "ratio": (0.1 if graph else 0.2) * batch,
        }
        for kind in KINDS
        for batch in (32, 16, 1)
        for graph in (True, False)
    ]
    by_name = {goal.name: goal.value for goal in goals_of(rows, 12.0)}
    assert by_name["merged step / bytes, batch 16"] == pytest.approx(1.6)
    assert by_name["capture of the CUDA graphs, s"] == 12.0 and by_name["steps run as CUDA graphs"] == 1
    assert by_name["mixed / merged, batch 16"] == 2.0
    assert by_name["unmerged 8 x r16 / merged, batch 16"] == 1.0
    assert by_name["host ms of a step, batch 32, any mode"] == pytest.approx(0.64)


def test_a_graph_is_captured_after_a_first_call_and_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch.cuda that records the order."""
    done: list[str] = []

    class Recorded:
        def __init__(self, **_: object) -> None: ...
        def __enter__(self) -> None:
            done.append("capture")

        def __exit__(self, *_: object) -> None:
            done.append("captured")

        def replay(self) -> None:
            done.append("replay")

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None: ...
        def wait_stream(self, stream: object) -> None: ...
        def elapsed_time(self, stop: object) -> float:
            return 6.0  # ms

    class Stream:
        def __init__(self, stream: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    cuda = SimpleNamespace(
        Stream=Recorded, Event=Recorded, CUDAGraph=Recorded, stream=Stream, current_stream=Recorded,
        graph=lambda graph: graph, synchronize=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(replays.torch, "cuda", cuda)
    timed = replays.Replays(lambda: done.append("call"), lambda: done.append("evict"), parts=3)
    assert timed() == pytest.approx(2e-3)
    first = ["call", "capture", "call", "captured"]
    assert done == [*first, "evict", "event", "replay", "event"]
    timed()
    assert done == [*first, *["evict", "event", "replay", "event"] * 2]


def test_kernels_that_overlap_count_once() -> None:
    assert profiling.covered([]) == 0
    assert profiling.covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (3.0, 3.5)]) == 4.5
