"""In-place switching gives the reference answers, regardless of the sequence of merges."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import atmm
from tests.families import build_model
from tests.harness import FixedModes, run_engine
from tests.references import CASES, NUM_TOKENS, CaseReference, assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.engine import Engine
from vlora.engine.limits import Room
from vlora.errors import BadConfig
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.types import Mode, Request, SamplingParams

pytestmark = pytest.mark.gpu

PLAN = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64"), (Mode.MIXED, "patterned16")]


class Saved:
    """A family's reference, and its model as a checkpoint on disk."""

    def __init__(self, reference: CaseReference, folder: Path) -> None:
        self.reference = reference
        self.folder = str(folder / "model")
        build_model(reference.family).save_pretrained(self.folder)


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def saved(
    request: pytest.FixtureRequest,
    case_references: Callable[[str], CaseReference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    return Saved(case_references(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[False, True], ids=["rewriting", "subtracting"])
def subtracting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both variants on any device."""

    def made(*arguments: object, **_: object) -> InPlaceSwitcher:
        return InPlaceSwitcher(*arguments, subtracting=request.param)  # type: ignore[arg-type]

    monkeypatch.setattr("vlora.engine.device_runtime.InPlaceSwitcher", made)
    return bool(request.param)


@pytest.mark.slow
def test_modes_change_in_the_middle_of_requests(saved: Saved, subtracting: bool) -> None:
    run = run_engine(
        saved.reference,
        FixedModes(*PLAN[0], plan=PLAN),
        NUM_TOKENS,
        max_step_tokens=24,
        checkpoint=saved.folder,
        switching="in_place",
    )
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED} and run.num_switches > 10
    for got, want in zip(run.answers, saved.reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("merged", [pytest.param("wide8", marks=pytest.mark.slow), "everywhere64"])
def test_merged_batch_of_one_adapter(saved: Saved, subtracting: bool, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    run = run_engine(
        saved.reference,
        FixedModes(Mode.MERGED, merged),
        NUM_TOKENS,
        only=own,
        checkpoint=saved.folder,
        switching="in_place",
    )
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, saved.reference.answers[case])


@pytest.mark.slow
def test_algorithm_1_end_to_end(saved: Saved, subtracting: bool) -> None:
    run = run_engine(saved.reference, None, NUM_TOKENS, checkpoint=saved.folder, switching="in_place")
    for got, want in zip(run.answers, saved.reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.slow
def test_bfloat16_weights_and_answers_equal_those_of_the_shadow(saved: Saved, subtracting: bool) -> None:
    engines = [engine_of(saved, switching=switching, dtype="bfloat16").engine for switching in ("in_place", "shadow")]
    in_place, shadow = (engine.parts.device.slabs.linears for engine in engines)
    draw = random.Random(5)
    for _ in range(50):
        name = draw.choice(["wide8", "narrow4", None])
        for engine in engines:
            key = None if name is None else engine.parts.registry.get(name).key
            if name is not None:
                engine.pin_adapter(name, True)  # blocks until it is resident
                engine.pin_adapter(name, False)
            with torch.no_grad():
                engine.parts.device.switcher.switch(key)
        for site, linear in in_place.items():
            want = shadow[site].weight.float()
            assert float((linear.weight.float() - want).norm() / want.norm()) <= (MAX_DRIFT if subtracting else 0), site
    own = [CASES.index(("wide8", 1))]
    answers = [
        run_engine(
            saved.reference,
            FixedModes(Mode.MERGED, "wide8"),
            NUM_TOKENS,
            only=own,
            checkpoint=saved.folder,
            switching=switching,
            dtype=torch.bfloat16,
        ).answers[0]
        for switching in ("in_place", "shadow")
    ]
    # The first merge starts from W0 in both variants.
    assert answers[0][0] == answers[1][0] and torch.equal(answers[0][1], answers[1][1])


def engine_of(saved: Saved, **settings: object) -> LocalEngine:
    local = LocalEngine(EngineConfig(model=saved.folder, arena_bytes=2**26, merge_fidelity_floor=0.0, **settings))  # type: ignore[arg-type]
    for name in ("wide8", "narrow4"):
        local.engine.load_adapter(name, saved.reference.adapters[name])
    return local


def request_of(saved: Saved, case: int, request_id: str = "r") -> Request:
    adapter, prompt = saved.reference.cases[case]
    return Request(
        request_id=request_id,
        prompt_ids=prompt.prompt_ids,
        vision=prompt.vision,
        adapter=adapter,
        sampling=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )


def merged_while_answering(engine: Engine, saved: Saved) -> str:
    """Step until a request's adapter is merged; reading and loading it takes several steps."""
    engine.add(request_of(saved, CASES.index(("wide8", 1))))
    while engine.parts.device.switcher.merged_key is None:
        assert engine.has_work
        engine.step()
    return engine.parts.device.switcher.merged_key


def test_an_adapter_that_is_unloaded_while_merged_leaves_the_base_weights(saved: Saved, subtracting: bool) -> None:
    engine = engine_of(saved, switching="in_place").engine
    linears = engine.parts.device.slabs.linears.values()
    before = [linear.weight.clone() for linear in linears]
    assert merged_while_answering(engine, saved).startswith("wide8@")
    assert not all(
        torch.equal(a.weight, b) for a, b in zip(engine.parts.device.slabs.linears.values(), before, strict=True)
    )
    engine.unload_adapter("wide8")
    assert engine.parts.device.switcher.merged_key is None
    assert all(
        torch.equal(a.weight, b) for a, b in zip(engine.parts.device.slabs.linears.values(), before, strict=True)
    )


def test_fidelity_is_measured_against_the_base_weights_whatever_is_merged(saved: Saved, subtracting: bool) -> None:
    engine = engine_of(saved, switching="in_place", dtype="bfloat16").engine
    (before,) = [status for status in engine.adapters() if status.name == "narrow4"]
    merged_while_answering(engine, saved)
    after = engine.load_adapter("again", saved.reference.adapters["narrow4"])
    assert after.merge_fidelity == before.merge_fidelity


def test_a_failed_switch_fails_only_its_batch(saved: Saved, subtracting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    local = engine_of(saved, switching="in_place")
    calls = 0

    def breaking(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        atmm.operator.merge(*arguments)  # type: ignore[arg-type]

    case = CASES.index(("wide8", 1))
    monkeypatch.setattr(atmm, "merge", breaking)
    failed = local.run([request_of(saved, case, "first")])["first"][-1]
    assert failed.error is not None and failed.error.code == "step_failed" and "out of memory" in failed.error.message
    assert local.engine.parts.device.switcher.merged_key is None
    answered = local.run([request_of(saved, case, "second"), request_of(saved, CASES.index((None, 0)), "third")])
    for request_id, own in (("second", case), ("third", CASES.index((None, 0)))):
        tokens = [token for part in answered[request_id] for token in part.token_ids]
        assert tokens == saved.reference.answers[own][0]


@pytest.mark.parametrize("fits", [True, False])
def test_auto_selects_by_memory(
    saved: Saved, fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room("cpu", 2**26 + (2**22 if fits else 1))
    monkeypatch.setattr("vlora.engine.device_runtime.free_room", lambda config, device: room)
    engine = engine_of(saved).engine
    assert engine.parts.device.slabs.num_bytes < 2**22
    assert isinstance(engine.parts.device.switcher, ShadowSwitcher if fits else InPlaceSwitcher)
    assert ("no room for a shadow copy" in caplog.text) == (not fits)


def test_auto_without_checkpoint_files_keeps_the_shadow(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadConfig("layers.1 is not what was loaded")

    monkeypatch.setattr("vlora.engine.device_runtime.free_room", lambda config, device: Room("cpu", 2**26))
    monkeypatch.setattr("vlora.engine.device_runtime.CheckpointBaseWeights", refuse)
    assert isinstance(engine_of(saved).engine.parts.device.switcher, ShadowSwitcher)
    with pytest.raises(BadConfig, match="not what was loaded"):
        engine_of(saved, switching="in_place")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_random_weights_are_copied_and_a_checkpoint_is_not(
    saved: Saved, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[WeightSlabs] = []

    def copying(slabs: WeightSlabs) -> CopiedBaseWeights:
        copied.append(slabs)
        return CopiedBaseWeights(slabs)

    monkeypatch.setattr("vlora.engine.device_runtime.CopiedBaseWeights", copying)
    engine = engine_of(saved, switching="in_place", load_format=load_format).engine
    assert isinstance(engine.parts.device.switcher, InPlaceSwitcher)
    assert len(copied) == (load_format == "dummy")
