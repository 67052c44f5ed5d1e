"""Compositions on several ranks answer as PEFT's, also of parts that ranks shard in different ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.test_composition import BOTH, make_reference
from tests.families import build_model
from tests.harness import FixedModes, RecordingEngine
from tests.references import NUM_TOKENS, CaseReference
from vlora.types import Mode

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    folder = tmp_path_factory.mktemp("composition")
    build_model(FAMILY).save_pretrained(folder / "model")
    return make_reference(FAMILY, folder)


@pytest.fixture(scope="module")
def recorded(reference: CaseReference) -> Iterator[RecordingEngine]:
    recorded = RecordingEngine(
        reference,
        None,
        checkpoint=str(Path(reference.adapters["wide8"]).parent / "model"),
        tensor_parallel=2,
        sharding=("wide8=slora", "*=replicated"),
        threads=1,
    )
    yield recorded
    recorded.engine.close()


@pytest.mark.parametrize(("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, BOTH)], ids=["unmerged", "mixed"])
def test_batch_of_compositions_and_single_adapters(
    reference: CaseReference, recorded: RecordingEngine, mode: Mode, merged: str | None
) -> None:
    recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    assert mode in recorded.modes
    reference.expect(answers)
