"""The vision tower in pieces gives bit-identical results to one call, and the results of the published code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

import atmm
from tests.families import FAMILIES, VIDEO_FAMILIES, build_model, make_prompt
from vlora.models.families import encode_patches, patch_flops
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.models.vision import stepwise_tower
from vlora.models.vision.stepwise_tower import PacedCall
from vlora.types import VisionInput

Fields = list[dict[str, torch.Tensor]]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepwise_tower, "CPU_PIECE_FLOPS", 2e4)
    monkeypatch.setattr(stepwise_tower, "MIN_ROWS", 8)
    monkeypatch.setattr(stepwise_tower, "MIN_QUERIES", 4)


def images_of(family: str, model: object, count: int = 2, videos: int = 0) -> tuple[VisionInput, ...]:
    return make_prompt(family, model, 0, num_images=count, num_videos=videos).vision


def fields_of(items: tuple[VisionInput, ...]) -> Fields:
    return [{name: to_tensor(value) for name, value in item.fields.items()} for item in items]


def encode(hf_model: HFModel, kind: str, fields: Fields, lanes: list[atmm.Lane]) -> list[VisionFeatures]:
    units = sum(hf_model.num_units(kind, item) for item in fields)
    with hf_model.vision_scope.lanes(units, lanes):
        return hf_model.encode(kind, fields)


def in_steps(call: PacedCall[list[VisionFeatures]], flops: float) -> int:
    """Run a call to its end, with other work of the same model between steps. Returns the number of steps."""
    for number in range(1, 100_000):
        with torch.inference_mode():
            if call.advance(flops):
                return number
    raise AssertionError("the call does not finish")


def assert_equal(found: list[VisionFeatures], wanted: list[VisionFeatures]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.rows, other.rows)
        assert len(one.deepstack) == len(other.deepstack)
        assert all(map(torch.equal, one.deepstack, other.deepstack))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_in_steps_and_at_once_are_bit_equal(family: str, kind: str, small_pieces: None) -> None:
    if kind == "video" and family not in VIDEO_FAMILIES:
        pytest.skip("the family does not accept videos")
    model = build_model(family)
    items = images_of(family, model) if kind == "image" else images_of(family, model, 0, 1)
    hf_model, fields = HFModel(model), fields_of(items)
    with torch.inference_mode():
        whole = encode(hf_model, kind, fields, [])
    call = PacedCall(lambda: encode(hf_model, kind, fields, []))
    assert in_steps(call, 1e5) > 5
    assert_equal(call.result, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_the_published_code_gives(family: str, small_pieces: None) -> None:
    published = build_model(family)
    items = images_of(family, published)
    (fields, *_) = fields_of(items)
    names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
    with torch.inference_mode():
        rest = {name: fields[name] for name in names[1:] if name in fields}
        wanted = published.model.get_image_features(fields["pixel_values"], **rest, return_dict=True).pooler_output
        (found,) = HFModel(build_model(family)).encode("image", [fields])
    torch.testing.assert_close(found.rows, wanted[0].reshape(found.rows.shape), rtol=1e-4, atol=1e-5)


def test_other_lanes_between_two_steps_change_nothing(small_pieces: None) -> None:
    model = build_model("qwen2_vl")
    hf_model, fields = HFModel(model), fields_of(images_of("qwen2_vl", model))
    lanes = []
    for key in ("a", "b"):
        for layer in hf_model.vision_linears.values():
            down, up = torch.randn(4, layer.in_features), torch.randn(4, layer.out_features)
            layer.site.factors[key] = atmm.Factors(down, up)
        units = sum(hf_model.num_units("image", item) for item in fields)
        lanes.append([atmm.Lane(key, 0, units, 1.0)])
    with torch.inference_mode():
        first, second = (encode(hf_model, "image", fields, each) for each in lanes)
    assert not torch.equal(first[0].rows, second[0].rows)
    call = PacedCall(lambda: encode(hf_model, "image", fields, lanes[0]))
    done = False
    while not done:
        with torch.inference_mode():
            done = call.advance(5e5)
            with hf_model.vision_scope.suspended():
                assert_equal(encode(hf_model, "image", fields, lanes[1]), second)
    assert_equal(call.result, first)


def test_an_abandoned_call_exits_its_lanes(small_pieces: None) -> None:
    model = build_model("llava")
    hf_model, fields = HFModel(model), fields_of(images_of("llava", model))
    call = PacedCall(lambda: encode(hf_model, "image", fields, [atmm.Lane("gone", 0, 2, 1.0)]))
    with torch.inference_mode():
        assert not call.advance(1e4)
    assert hf_model.vision_scope.plan_for(2) is not None
    call.close()
    assert hf_model.vision_scope.plan_for(2) is None


def test_an_exception_of_a_call_is_raised_by_its_step() -> None:
    def fail() -> None:
        stepwise_tower.spend(1e9)
        raise ValueError("broken")

    call = PacedCall(fail)
    assert not call.advance(1.0)
    with pytest.raises(ValueError, match="broken"):
        call.advance(1.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_patch_counts_match_the_operations_spent(family: str, count: int) -> None:
    model = build_model(family)
    items = images_of(family, model, count)
    hf_model = HFModel(model)
    call = PacedCall(lambda: encode(hf_model, "image", fields_of(items), []))
    in_steps(call, 1e15)
    expected = sum(encode_patches(model.config, item) for item in items)
    # Class tokens and tiles that only pad a batch are not counted.
    assert call.flops / patch_flops(model.config) == pytest.approx(expected, rel=0.25)


@pytest.fixture
def without_greenlet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as in an installation without greenlet."""
    monkeypatch.setitem(sys.modules, "greenlet", None)
    spec = importlib.util.find_spec("vlora.models.vision.stepwise_tower")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_greenlet_a_call_runs_whole(without_greenlet: ModuleType) -> None:
    spent: list[float] = []

    def call() -> str:
        for flops in (1e9, 2e9):
            without_greenlet.spend(flops)
            spent.append(flops)
        return "features"

    paced = without_greenlet.PacedCall(call)
    assert paced.advance(1.0) and paced.result == "features" and spent == [1e9, 2e9]
    assert paced.advance(1.0) and len(spent) == 2
    paced.close()


def test_without_greenlet_the_error_of_a_call_is_raised_once(without_greenlet: ModuleType) -> None:
    def fail() -> None:
        raise ValueError("broken picture")

    paced = without_greenlet.PacedCall(fail)
    with pytest.raises(ValueError, match="broken picture"):
        paced.advance(1.0)
    assert paced.advance(1.0)
