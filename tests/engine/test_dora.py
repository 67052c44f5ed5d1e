"""Adapters with DoRA answer as under PEFT, in every mode and beside any other adapter."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.engine.test_relocation import shuffled
from tests.families import EACH_FAMILY, LANGUAGE_LINEARS, build_model, vision_linears
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import Oracle
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference, assert_same, prompts_of
from vlora.errors import BadAdapter
from vlora.lora import adapted_linear
from vlora.lora.merge_in_place import InPlaceSwitcher
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("dora8", 1), ("wide8", 1), (None, 1), ("narrow_dora", 0), ("dora_everywhere", 2), ("dora8", 0))
PLAN = [(Mode.MIXED, "dora8"), (Mode.UNMERGED, None), (Mode.MIXED, "wide8"), (Mode.MIXED, "dora_everywhere")]


def make_reference(family: str, folder: Path) -> CaseReference:
    model = build_model(family)
    everywhere = f"({LANGUAGE_LINEARS}|{vision_linears(family)})"
    configs = {
        "dora8": LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=LANGUAGE_LINEARS),
        "wide8": LoraConfig(r=8, lora_alpha=16, target_modules=LANGUAGE_LINEARS),
        "narrow_dora": LoraConfig(r=4, use_dora=True, target_modules=r".*language_model.*\.(q_proj|v_proj)"),
        "dora_everywhere": LoraConfig(r=8, use_rslora=True, use_dora=True, target_modules=everywhere),
    }
    oracle = Oracle(family, model, configs=configs)
    cases = prompts_of(family, model, CASES)
    answers = [oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
    return CaseReference(family, oracle.save(folder), cases, answers)


@pytest.fixture(scope="module", params=EACH_FAMILY)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    return make_reference(request.param, tmp_path_factory.mktemp("dora"))


SLOW_SWITCHING = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("rewriting", "subtracting")]


@pytest.fixture(params=["shadow", *SLOW_SWITCHING])
def switching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def made(*arguments: object, **_: object) -> InPlaceSwitcher:
        return InPlaceSwitcher(*arguments, subtracting=request.param == "subtracting")  # type: ignore[arg-type]

    monkeypatch.setattr("vlora.engine.device_runtime.InPlaceSwitcher", made)
    yield "shadow" if request.param == "shadow" else "in_place"


def test_unmerged_batch_of_several_adapters(reference: CaseReference) -> None:
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, encode_share=1e9)
    assert Mode.UNMERGED in run.modes and Mode.MIXED not in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize(
    "merged",
    ["dora8", "wide8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dora_everywhere", "narrow_dora"))],
)
def test_mixed_batch_over_one_merged_adapter(reference: CaseReference, merged: str) -> None:
    run = run_engine(reference, FixedModes(Mode.MIXED, merged), NUM_TOKENS, encode_share=1e9)
    assert Mode.MIXED in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize("merged", ["dora8", "dora_everywhere"])
def test_merged_batch_of_one_adapter(reference: CaseReference, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    run = run_engine(reference, FixedModes(Mode.MERGED, merged), NUM_TOKENS, only=own)
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, reference.answers[case])


def test_modes_change_in_the_middle_of_requests(reference: CaseReference, switching: str) -> None:
    run = run_engine(reference, FixedModes(*PLAN[0], plan=PLAN), NUM_TOKENS, max_step_tokens=24, switching=switching)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED} and run.num_switches > 10
    reference.expect(run.answers)


@pytest.mark.slow
@pytest.mark.usefixtures("no_kv_admission")
def test_adapters_move_in_the_arena_between_steps(reference: CaseReference) -> None:
    recorded = RecordingEngine(reference, FixedModes(*PLAN[0], plan=PLAN), max_step_tokens=24)
    recorded.answer(reference.cases, 1)  # from now on images are cached, so that all requests start at once
    counts = shuffled(recorded)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    assert sum(counts) > len(counts)
    reference.expect(answers)


@pytest.mark.slow
def test_adapters_are_evicted_and_loaded_again(reference: CaseReference) -> None:
    many = copy.copy(reference)
    many.adapters = {f"{name}-{i}": path for i in range(3) for name, path in reference.adapters.items()}
    cases = [(name and f"{name}-{i}", prompt) for i in (0, 1, 2, 0) for name, prompt in reference.cases]
    policy = FixedModes(Mode.MIXED, "dora8-1")
    run = run_engine(many, policy, NUM_TOKENS, cases=cases, scarce_memory=True, background=True)
    assert run.num_loads >= len(many.adapters) > run.num_resident
    for got, want in zip(run.answers, 4 * reference.answers, strict=True):
        assert_same(got, want)


def worst(reference: CaseReference, mode: Mode, merged: str | None = None) -> float:
    """The largest difference of the first token's logits."""
    run = run_engine(reference, FixedModes(mode, merged), NUM_TOKENS, encode_share=1e9)
    pairs = zip(run.answers, reference.answers, strict=True)
    return max(float((got[1][0] - want[1][0]).abs().max()) for got, want in pairs)


@pytest.mark.parametrize("left_out", ["apply_changes", "undo_changes"])
def test_without_a_scale_answers_are_wrong(
    reference: CaseReference, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted_linear, left_out, lambda *_: None)
    assert worst(reference, Mode.MIXED, "dora8") > 100 * TOLERANCE
    if left_out == "undo_changes":  # it has no part in unmerged steps
        assert worst(reference, Mode.UNMERGED) < TOLERANCE


@pytest.fixture
def changed(reference: CaseReference, tmp_path: Path) -> Path:
    """A copy of an adapter, which a test changes."""
    return Path(shutil.copytree(reference.adapters["dora8"], tmp_path / "changed"))


def change_magnitudes(folder: Path, factor: float) -> None:
    """Multiply the first magnitude of every layer."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "magnitude" in name:
            tensor[0] *= factor
    save_file(tensors, file)


@pytest.mark.parametrize(("factor", "mergeable"), [(0.7, True), (0.1, False), (0.0, False), (-1.0, True)])
def test_an_adapter_with_a_tiny_scale_is_never_merged(
    reference: CaseReference, changed: Path, factor: float, mergeable: bool
) -> None:
    change_magnitudes(changed, factor)
    engine = RecordingEngine(reference, None).engine
    assert engine.load_adapter("changed", str(changed)).mergeable == mergeable


def test_magnitudes_that_are_not_finite_are_rejected(reference: CaseReference, changed: Path) -> None:
    change_magnitudes(changed, float("inf"))
    engine = RecordingEngine(reference, None).engine
    with pytest.raises(BadAdapter, match=r"lora_magnitude_vector.* not finite"):
        engine.load_adapter("changed", str(changed))
