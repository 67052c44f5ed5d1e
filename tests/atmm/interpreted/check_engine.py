"""The engine with a GPU's kernels, on a CPU: Triton's in the interpreter, torch's flash kernel replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from atmm import flash_attention, operator
from atmm.triton import pointwise
from tests.atmm.flash_oracle import VERSIONS
from tests.harness import FixedModes, run_engine
from tests.references import CaseReference, assert_same
from vlora.models import runner
from vlora.models.gpu.attention import BlockDecodes, FlashChunks, GpuAttention
from vlora.types import Mode

NUM_TOKENS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of each kind of attention, which the engine uses as on a GPU."""
    counted: Counter[str] = Counter()
    for kind in (BlockDecodes, FlashChunks):

        def attend(self: Any, *given: Any, kind: Any = kind, plain: Any = kind.attend) -> None:
            counted[kind.__name__] += 1
            plain(self, *given)

        monkeypatch.setattr(kind, "attend", attend)
    monkeypatch.setattr(flash_attention, "kernel", lambda: VERSIONS["2.13"])

    class OnGpu(GpuAttention):
        @classmethod
        def of(cls, hf_model: Any, block_size: int, block_rows: int) -> GpuAttention:
            return GpuAttention(hf_model.device, block_size, block_rows, decodes=True, prefills=True)

    monkeypatch.setattr(runner, "GpuAttention", OnGpu)
    for name in ("rms_norm", "gate_product", "rotate", "write_kv"):
        monkeypatch.setattr(pointwise, name, _counting(getattr(pointwise, name), name, counted))
    prepare = operator.strategy_in_place

    def in_place(*given: Any) -> Any:
        strategy = prepare(*given)
        counted["adapters in place" if strategy is not None else "adapters by products"] += 1
        return strategy

    monkeypatch.setattr(operator, "strategy_in_place", in_place)
    return counted


def _counting(plain: Callable[..., Any], name: str, counted: Counter[str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        counted[name] += 1
        return plain(*given)

    return call


# Few cases, as the interpreter is slow: images with an adapter for all layers, and text with others and without one.
@pytest.mark.parametrize(
    ("family", "cases", "max_step_tokens"), (("qwen2_vl", (0, 1, 2, 4), 24), ("llava_onevision", (0, 1, 6), 512))
)
def test_modes_that_change_give_the_answers_of_transformers(
    family: str,
    cases: tuple[int, ...],
    max_step_tokens: int,
    case_references: Callable[[str], CaseReference],
    calls: Counter[str],
) -> None:
    reference = case_references(family)
    plan = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64")]
    policy = FixedModes(*plan[0], plan=plan)
    run = run_engine(reference, policy, NUM_TOKENS, only=cases, max_step_tokens=max_step_tokens)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED}
    assert calls["BlockDecodes"] > 10 and calls["FlashChunks"] >= 4
    assert calls["adapters in place"] > 1 and not calls["adapters by products"]
    assert all(calls[name] > 10 for name in ("rms_norm", "gate_product", "rotate", "write_kv"))
    for got, case in zip(run.answers, cases, strict=True):
        tokens, logits = reference.answers[case]
        assert_same(got, (tokens[:NUM_TOKENS], logits[:NUM_TOKENS]))
