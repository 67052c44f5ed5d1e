"""Settings and samples that cannot be trained are refused with one clear line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from atmm.formats import FORMATS
from atmm.quantized import QuantizedWeight
from tests.families import IMAGE, build_model
from vlora.errors import BadConfig, BadRequest, VLoraError
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.training import LoraSettings, PackedTrainer, Sample


def test_models_without_whole_weights_in_this_process() -> None:
    hf_model = HFModel(build_model("qwen2_vl"))
    layer = next(iter(hf_model.language_linears.values()))
    layer.shard = layer.shard._replace(size=2)
    with pytest.raises(BadConfig, match="start without --tensor-parallel"):
        PackedTrainer(hf_model)
    layer.shard = layer.shard._replace(size=1)
    layer.quantized = QuantizedWeight(*FORMATS["int8"].encode(layer.weight.detach()), torch.float32, FORMATS["int8"])
    with pytest.raises(BadConfig, match="start without --quantize"):
        PackedTrainer(hf_model)


@pytest.fixture(scope="module")
def trainer() -> PackedTrainer:
    made = PackedTrainer(HFModel(build_model("qwen2_vl")))
    made.add("a", LoraSettings())
    return made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank is 0; give 1 or more"),
        ({"alpha": 0.0}, "alpha is 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; give a number above 0"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("q_proj", "qkv")}, "targets: no linear layer is named qkv; it has down_proj, gate_proj"),
    ],
)
def test_settings_that_cannot_be_trained(settings: dict[str, Any], message: str, trainer: PackedTrainer) -> None:
    with pytest.raises(BadConfig, match=re.escape(message)):
        trainer.add("b", LoraSettings(**settings))


def test_a_name_in_use(trainer: PackedTrainer) -> None:
    with pytest.raises(BadConfig, match="an adapter 'a' is in training already"):
        trainer.add("a", LoraSettings())


IDS = torch.tensor([5, 6, 7])
WITH_IMAGE = torch.tensor([5, IMAGE, 7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS, IDS[:2]), "a sample has (3,) tokens and (2,) labels"),
        ((IDS, torch.tensor([5, -100, -100])), "no label after its first token"),
        ((IDS, IDS, torch.zeros(1, 3)), "positions of shape (1, 3); this model needs (3, 3)"),
        ((torch.tensor([5, 6, 200]), IDS), "a token outside the model's vocabulary of 200"),
        ((WITH_IMAGE, IDS), "a sample has 1 image and video tokens and features of 0"),
        ((IDS, IDS, None, VisionFeatures(torch.zeros(2, 64), ())), "a sample has 0 image and video tokens"),
        ((IDS.repeat(400), IDS.repeat(400)), "a sample has 1200 tokens; the model takes at most 1024"),
    ],
)
def test_samples_that_do_not_fit(arguments: tuple[Any, ...], message: str, trainer: PackedTrainer) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        trainer.micro_step({"a": [Sample(*arguments)]})
    assert not trainer.adapters["a"].busy


def test_micro_steps_of_nothing_and_of_unknown_adapters(trainer: PackedTrainer) -> None:
    refused: list[tuple[Any, str]] = [
        ({"b": [Sample(IDS, IDS)]}, "no adapter in training is named b"),
        ({"a": []}, r"there are none of a$"),
        ({}, r"samples of every adapter; there are none"),
    ]
    for samples, message in refused:
        with pytest.raises(VLoraError, match=message):
            trainer.micro_step(samples)
