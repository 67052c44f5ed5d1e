"""The engine with adapters that the Triton kernels read in place in the arena, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import atmm
from tests.harness import FixedModes, run_engine
from tests.references import NUM_TOKENS, CaseReference, assert_same
from vlora.types import Mode


def test_answers_equal_peft_in_every_mode(
    case_references: Callable[[str], CaseReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = case_references("qwen2_vl")
    in_place: list[bool] = []
    prepare = atmm.operator._in_place

    def recorded(*given: object) -> object:
        strategy = prepare(*given)  # type: ignore[arg-type]
        in_place.append(strategy is not None)
        return strategy

    monkeypatch.setattr("atmm.operator._in_place", recorded)
    plan = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64"), (Mode.MIXED, "patterned16")]
    run = run_engine(reference, FixedModes(*plan[0], plan=plan), NUM_TOKENS, max_step_tokens=24)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED}
    assert in_place and all(in_place)
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)
