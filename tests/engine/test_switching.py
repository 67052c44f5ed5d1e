"""Switches of merged adapters: what is chosen, failures, and the exact weights that they leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import atmm
from tests.engine.asking import ask, tokens
from tests.engine.forms import FormReference
from tests.harness import FixedModes, run_engine
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.limits import Room
from vlora.errors import BadConfig
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.merge import ShadowSwitcher
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.types import Mode, Request

pytestmark = pytest.mark.gpu

NUM_TOKENS = 6
ADAPTERS = ("wide8", "narrow4", "everywhere64")


@pytest.fixture(scope="module")
def saved(form_reference: Callable[[str, str], FormReference]) -> FormReference:
    return form_reference("lora", "llava")


@pytest.fixture(params=[False, True], ids=["rewriting", "subtracting"])
def subtracting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Both variants on any device."""

    def made(*arguments: Any, **_: Any) -> InPlaceSwitcher:
        return InPlaceSwitcher(*arguments, subtracting=request.param)

    monkeypatch.setattr("vlora.engine.device_runtime.InPlaceSwitcher", made)
    yield request.param


def engine_of(saved: FormReference, **settings: Any) -> LocalEngine:
    config = EngineConfig(model=saved.checkpoint, arena_bytes=2**26, merge_fidelity_floor=0.0, **settings)
    local = LocalEngine(config)
    for name in ADAPTERS:
        local.engine.load_adapter(name, saved.adapters[name])
    return local


def switch(local: LocalEngine, name: str | None) -> None:
    """Merge an adapter, which is loaded first."""
    if name is not None:
        local.engine.pin_adapter(name, True)
        local.engine.pin_adapter(name, False)
    with torch.no_grad():
        local.engine.parts.device.switcher.switch(name and local.engine.parts.registry.get(name).key)


def weights(local: LocalEngine) -> dict[str, torch.Tensor]:
    return {name: linear.weight.clone() for name, linear in local.engine.parts.device.slabs.linears.items()}


def apart(local: LocalEngine, wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance (RMS) of a layer's weights."""
    found = weights(local)
    return max(float((found[name] - want).float().norm() / want.float().norm()) for name, want in wanted.items())


@pytest.mark.slow
def test_bfloat16_weights_and_answers_equal_those_of_the_shadow(saved: FormReference, subtracting: bool) -> None:
    in_place, shadow = (engine_of(saved, switching=kind, dtype="bfloat16") for kind in ("in_place", "shadow"))
    draw = random.Random(5)
    for _ in range(50):
        name = draw.choice(["wide8", "narrow4", None])
        switch(in_place, name)
        switch(shadow, name)
        assert apart(in_place, weights(shadow)) <= (MAX_DRIFT if subtracting else 0)
    answers = [
        run_engine(
            saved,
            FixedModes(Mode.MERGED, "wide8"),
            NUM_TOKENS,
            cases=saved.of("wide8")[:1],
            checkpoint=saved.checkpoint,
            switching=switching,
            dtype=torch.bfloat16,
        ).answers[0]
        for switching in ("in_place", "shadow")
    ]
    # The first merge starts from W0 in both variants.
    assert answers[0][0] == answers[1][0] and torch.equal(answers[0][1], answers[1][1])


def request_of(saved: FormReference, adapter: str | None, request_id: str = "r") -> Request:
    return ask(saved.of(adapter)[0][1], request_id, adapter, NUM_TOKENS)


def test_unloading_while_merged_restores_the_base_weights(saved: FormReference, subtracting: bool) -> None:
    """And an adapter that is loaded meanwhile is compared with the base weights."""
    local = engine_of(saved, switching="in_place", dtype="bfloat16")
    engine, switcher = local.engine, local.engine.parts.device.switcher
    (before,) = [status for status in engine.adapters() if status.name == "narrow4"]
    base = weights(local)
    engine.add(request_of(saved, "wide8"))
    while switcher.merged_key is None:  # reading and loading it takes several steps
        assert engine.has_work
        engine.step()
    assert switcher.merged_key.startswith("wide8@") and apart(local, base) > 0.01
    after = engine.load_adapter("again", saved.adapters["narrow4"])
    assert after.merge_fidelity == before.merge_fidelity
    engine.unload_adapter("wide8")
    assert switcher.merged_key is None and apart(local, base) == 0


def test_a_failed_switch_fails_only_its_batch(
    saved: FormReference, subtracting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the base weights, although layers had been merged before the failure."""
    local = engine_of(saved, switching="in_place")
    base = weights(local)
    calls = 0

    def breaking(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        atmm.operator.merge(*arguments)

    monkeypatch.setattr(atmm, "merge", breaking)
    failed = local.run([request_of(saved, "wide8", "first")])["first"][-1]
    assert failed.error is not None and failed.error.code == "step_failed" and "out of memory" in failed.error.message
    assert local.engine.parts.device.switcher.merged_key is None and apart(local, base) == 0
    answered = local.run([request_of(saved, "wide8", "second"), request_of(saved, None, "third")])
    for name, adapter in (("second", "wide8"), ("third", None)):
        assert tokens(answered[name]) == saved.answer(*saved.of(adapter)[0])[0][:NUM_TOKENS]


@pytest.mark.parametrize("fits", [True, False])
def test_auto_selects_by_memory(
    saved: FormReference, fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room("cpu", 2**26 + (2**22 if fits else 1))
    monkeypatch.setattr("vlora.engine.device_runtime.free_room", lambda config, device: room)
    device = engine_of(saved).engine.parts.device
    assert device.slabs.num_bytes < 2**22
    assert isinstance(device.switcher, ShadowSwitcher if fits else InPlaceSwitcher)
    assert ("no room for a shadow copy" in caplog.text) == (not fits)


def test_auto_without_checkpoint_files_keeps_the_shadow(saved: FormReference, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadConfig("layers.1 is not what was loaded")

    monkeypatch.setattr("vlora.engine.device_runtime.free_room", lambda config, device: Room("cpu", 2**26))
    monkeypatch.setattr("vlora.engine.device_runtime.CheckpointBaseWeights", refuse)
    assert isinstance(engine_of(saved).engine.parts.device.switcher, ShadowSwitcher)
    with pytest.raises(BadConfig, match="not what was loaded"):
        engine_of(saved, switching="in_place")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_random_weights_are_copied_and_a_checkpoint_is_not(
    saved: FormReference, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[WeightSlabs] = []

    def copying(slabs: WeightSlabs) -> CopiedBaseWeights:
        copied.append(slabs)
        return CopiedBaseWeights(slabs)

    monkeypatch.setattr("vlora.engine.device_runtime.CopiedBaseWeights", copying)
    engine = engine_of(saved, switching="in_place", load_format=load_format).engine
    assert isinstance(engine.parts.device.switcher, InPlaceSwitcher)
    assert len(copied) == (load_format == "dummy")
