"""The engine with a GPU's attention, on a CPU: decode kernels in the interpreter, torch's flash kernel replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from atmm import flash_attention
from tests.atmm.flash_oracle import VERSIONS
from tests.harness import FixedModes, run_engine
from tests.references import CaseReference, assert_same
from vlora.models import runner
from vlora.models.gpu_attention import BlockDecodes, FlashChunks, GpuAttention
from vlora.types import Mode

NUM_TOKENS = 3
CASES = (0, 1, 2, 4)  # the interpreter is slow


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
    return counted


@pytest.mark.parametrize(("family", "max_step_tokens"), (("qwen2_vl", 24), ("llava_onevision", 512)))
def test_modes_that_change_give_the_answers_of_transformers(
    family: str, max_step_tokens: int, case_references: Callable[[str], CaseReference], calls: Counter[str]
) -> None:
    reference = case_references(family)
    plan = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64")]
    policy = FixedModes(*plan[0], plan=plan)
    run = run_engine(reference, policy, NUM_TOKENS, only=CASES, max_step_tokens=max_step_tokens)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED}
    assert calls["BlockDecodes"] > 10 and calls["FlashChunks"] >= 4
    for got, case in zip(run.answers, CASES, strict=True):
        tokens, logits = reference.answers[case]
        assert_same(got, (tokens[:NUM_TOKENS], logits[:NUM_TOKENS]))
