"""The stages for a GPU, as far as a CPU runs them: a GPU's numbers of requests and rows on a small model, the goals,
the clock, and that wrong results are noticed. A mistake there would otherwise cost a GPU machine's time.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from atmm.tuning import timing as tuning_timing
from benchmarks.gpu import attention
from benchmarks.gpu import profile as profiling
from benchmarks.gpu.attention import Chunk, Heads, PagedBatch
from benchmarks.gpu.profile import KINDS
from benchmarks.gpu.serve import Load
from benchmarks.gpu.step import goals_of
from vlora.bench.dummy import small_config
from vlora.bench.gpu import context as timing
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.gpu.stages.smoke import checked, difference
from vlora.bench.report import Goal
from vlora.types import TokenScore

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
    monkeypatch.setattr(Context, "gpu", "H200")
    monkeypatch.setattr(Context, "synchronize", lambda self: None)
    monkeypatch.setattr(timing, "Replays", Immediate)
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(models, "config_of", lambda context: small_config())
    monkeypatch.setattr(models, "ARENA_BYTES", 2**28)


SMALLER: dict[str, dict[str, Any]] = {
    "step": {"PROMPT": 16, "BATCHES": (32, 16, 1)},
    "prefill": {"TOKENS": 64, "SIDE": 4, "OTHER_SIDES": (6, 8)},
    "merge": {"ARENA_BYTES": 2**27, "SWITCHES": 3},
    "serve": {"MIXED": Load(8, 8, 12, 4), "STREAMS": Load(32, 8, 12, 6)},
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
    ("stage", "num_goals"),
    [
        pytest.param("step", 8, marks=pytest.mark.gpu_sim),
        ("prefill", 4),
        pytest.param("merge", 5, marks=pytest.mark.gpu_sim),
        ("serve", 3),
        pytest.param("attention", 3, marks=pytest.mark.gpu_sim),
    ],
)
def test_goals_of_a_stage(stage: str, num_goals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.gpu.{stage}")
    for name, value in SMALLER[stage].items():
        monkeypatch.setattr(module, name, value)
    if stage == "step":
        counted = profiling.Profile(launches=300, copies=2, busy_s=1e-4, top=[])
        monkeypatch.setattr(module, "profiled", lambda context, call: counted)
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "memory_gib", lambda context: 1.0, raising=False)
    result = module.run(Context(CPU, tmp_path, time.monotonic() + 200, lambda found: kept.append(dict(found))))
    found: list[Goal] = result["goals"]
    assert len(found) == num_goals
    assert [goal.name for goal in found if math.isnan(goal.value)] == []
    assert result["summary"] and kept


def test_a_step_stage_compares_the_same_batch() -> None:
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
    by_name = {goal.name: goal.value for goal in goals_of(rows, 12.0, "")}
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
    monkeypatch.setattr(tuning_timing.torch, "cuda", cuda)
    timed = tuning_timing.Replays(lambda: done.append("call"), lambda: done.append("evict"), parts=3)
    assert timed() == pytest.approx(2e-3)
    first = ["call", "capture", "call", "captured"]
    assert done == [*first, "evict", "event", "replay", "event"]
    timed()
    assert done == [*first, *["evict", "event", "replay", "event"] * 2]


def test_kernels_that_overlap_count_once() -> None:
    assert profiling.covered([]) == 0
    assert profiling.covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (3.0, 3.5)]) == 4.5


# -- attention --------------------------------------------------------------------------------------------------------

HEADS = Heads(4, 2, 16)


def test_exact_results_are_those_of_torch_over_contiguous_kv() -> None:
    batch = PagedBatch([Chunk(20, 7), Chunk(0, 5), Chunk(40, 1)], HEADS, 2, torch.float32, CPU)
    found = batch.attend(1)
    first = 0
    for index, chunk in enumerate(batch.chunks):
        stop = first + chunk.num_tokens
        k, v = (each.transpose(0, 1)[None].double() for each in batch.context_of(index, 1))
        # The newest tokens of the context are the batch's own.
        assert torch.equal(k[0, :, chunk.start :].float(), batch.k[0, :, first:stop])
        mask = torch.ones(chunk.num_tokens, chunk.start + chunk.num_tokens).tril(chunk.start).bool()
        q = batch.q[:, :, first:stop].double()
        right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(batch.exact(index, 1), right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[first:stop].double(), right, rtol=1e-5, atol=1e-5)
        first = stop


def test_requests_share_no_row_and_layers_share_no_kv() -> None:
    batch = PagedBatch([Chunk(33, 1), Chunk(16, 1), Chunk(0, 3)], HEADS, 2, torch.float32, CPU)
    rows = torch.cat(batch.contexts)
    assert len(rows.unique()) == len(rows) == 48 + 32 + 16  # whole blocks
    before = batch.matrix.clone()
    batch.attend(0)
    changed = (batch.matrix != before).any(1).nonzero().flatten()
    assert len(changed) == 2 * 5  # K and V of one layer


def test_a_wrong_result_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.paged_attention

    def shifted(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        out, _ = plain(*args, **kwargs)  # type: ignore[arg-type]
        return out * 1.001, None

    monkeypatch.setattr(attention, "paged_attention", shifted)
    with pytest.raises(ValueError, match=r"attention, decode in torch.float32: relative error 1.0e-03 against float64"):
        attention.run(Context(CPU, tmp_path, time.monotonic() + 60, lambda result: None))


# -- smoke ------------------------------------------------------------------------------------------------------------


def score(*top: tuple[int, float]) -> TokenScore:
    return TokenScore(top[0][1], top)


def test_differences_are_of_the_most_likely_tokens() -> None:
    one = [score((5, -0.1), (7, -2.0)), score((1, -0.5), (2, -1.0))]
    other = [score((5, -0.1), (7, -2.25)), score((1, -0.5), (3, -1.0))]
    assert difference(one, one) == 0.0
    assert difference(one, other) == 0.25


def test_answers_that_part_are_compared_up_to_there() -> None:
    one = [score((5, -0.5), (7, -0.625)), score((1, -0.5))]
    other = [score((7, -0.5), (5, -0.625)), score((9, -8.0))]
    assert difference(one, other) == 0.125


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_infinitely_different(value: float) -> None:
    assert difference([score((5, value))], [score((5, -0.5))]) == math.inf
    assert difference([score((5, -0.5))], [score((5, value))]) == math.inf


def test_an_error_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="merge in bfloat16: relative error nan"):
        checked("merge", "bfloat16", math.nan)
    assert checked("merge", "bfloat16", 1e-3) == 1e-3
