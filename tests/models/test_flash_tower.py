"""The vision towers with torch's flash kernel, which its CPU implementation replaces, against the published code."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import atmm
from atmm import flash_attention
from tests.atmm.flash_oracle import VERSIONS
from tests.families import FAMILIES, VIDEO_FAMILIES, build_model, make_prompt
from vlora.models import hf_model as hf_model_module
from vlora.models.families import encode_patches, patch_flops
from vlora.models.hf_model import HFModel
from vlora.models.processing import to_tensor
from vlora.models.vision import flash_tower
from vlora.models.vision.stepwise_tower import PacedCall

NAMES = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of the kernel and of the attention, on a CPU that passes for a GPU."""
    counted: Counter[str] = Counter()
    flash, attend = VERSIONS["2.13"], flash_tower.flash_attention

    def counted_flash(*given: Any, **named: Any) -> torch.Tensor:
        counted["kernel"] += 1
        return flash(*given, **named)

    def counted_attention(*given: Any, **named: Any) -> Any:
        counted["attention"] += 1
        return attend(*given, **named)

    monkeypatch.setattr(flash_attention, "kernel", lambda: counted_flash)
    monkeypatch.setattr(flash_tower, "flash_attention", counted_attention)
    monkeypatch.setattr(
        hf_model_module,
        "register_vision_attention",
        lambda device: flash_tower.register_vision_attention(torch.device("cuda")),
    )
    return counted


def fields_of(family: str, model: Any, kind: str) -> list[dict[str, torch.Tensor]]:
    images, videos = (3, 0) if kind == "image" else (0, 1 if family == "llava_onevision" else 2)
    items = make_prompt(family, model, 0, num_images=images, num_videos=videos).vision
    return [{name: to_tensor(value) for name, value in item.fields.items()} for item in items]


@pytest.mark.parametrize("serves", (True, False), ids=("kernel", "plain"))
@pytest.mark.parametrize("kind", ("image", "video"))
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_give_what_the_published_code_gives(
    family: str, kind: str, serves: bool, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "video" and family not in VIDEO_FAMILIES:
        pytest.skip("the family does not accept videos")
    monkeypatch.setattr(atmm, "serves_flash", lambda device, dtype, head_dim: serves)
    published, model = build_model(family), HFModel(build_model(family))
    items = fields_of(family, published, kind)
    with torch.inference_mode():
        together = model.encode(kind, items)
    assert calls["attention"] > 0 and calls["kernel"] == (calls["attention"] if serves else 0)
    if model.family.mrope:
        assert calls["attention"] == len(published.model.visual.blocks)  # one call for all images
    for fields, found in zip(items, together, strict=True):
        call = published.model.get_image_features if kind == "image" else published.model.get_video_features
        names = NAMES if kind == "image" else ("pixel_values_videos", "video_grid_thw")
        pixels, *rest = (fields[name] for name in names if name in fields)
        named = dict(zip([name for name in names[1:] if name in fields], rest, strict=True))
        with torch.inference_mode():
            wanted = torch.cat([part.reshape(-1, 64) for part in call(pixels, **named, return_dict=True).pooler_output])
        torch.testing.assert_close(found.rows[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_still_advances_in_pieces_and_counts_its_work(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atmm, "serves_flash", lambda device, dtype, head_dim: True)
    model = HFModel(build_model(family))
    items = fields_of(family, model.model, "image")[:1]
    call = PacedCall(lambda: model.encode("image", items))
    pieces = 0
    done = False
    while not done:
        with torch.inference_mode():
            done = call.advance(1e4)
        pieces += 1
    assert pieces > 3
    patches = encode_patches(model.config, make_prompt(family, model.model, 0, num_images=3).vision[0])
    assert call.flops / patch_flops(model.config) == pytest.approx(patches, rel=0.25)


def test_the_attention_follows_the_model_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(build_model("qwen2_vl"))

    def attention() -> str:
        name: str = model.inner.visual.config._attn_implementation  # noqa: SLF001
        return name

    assert attention() == flash_tower.VISION_ATTENTION

    def moved(device: torch.device) -> None:
        monkeypatch.setattr(model, "embed", SimpleNamespace(weight=SimpleNamespace(device=device)))

    monkeypatch.setattr(model.model, "to", moved)
    model.move(torch.device("cuda"))
    assert attention() == flash_tower.VISION_FLASH
    model.move(torch.device("cpu"))
    assert attention() == flash_tower.VISION_ATTENTION
