"""Qwen-VL's checkpoints in the published layout: read as defined by a literal implementation, checked, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from vlora.config import EngineConfig
from vlora.engine.model_check import check_model
from vlora.errors import BadConfig, UnsupportedModel, VLoraError
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model, load_model, read_config
from vlora.models.qwen_vl.config import QwenVLConfig, translated

TOLERANCE = 1e-4


def pixels(seed: int) -> torch.Tensor:
    return torch.randn(3, small.IMAGE_SIZE, small.IMAGE_SIZE, generator=torch.Generator().manual_seed(seed))


def prompt_ids(seed: int, num_images: int, text: int = 7) -> list[int]:
    """Text around images, each between its start and end."""
    generator = torch.Generator().manual_seed(100 + seed)

    def words(count: int) -> list[int]:
        return torch.randint(0, small.NUM_RANKS, (count,), generator=generator).tolist()

    image = [small.IMAGE_START, *[small.IMAGE_PAD] * small.NUM_QUERIES, small.IMAGE_END]
    return [*words(text), *(token for _ in range(num_images) for token in [*image, *words(3)])]


def load(folder: Path, dtype: str = "float32") -> Any:
    return load_model(EngineConfig(model=str(folder), dtype=dtype))


@pytest.mark.parametrize(("shards", "pickled"), [(1, False), (3, False), (2, True)])
@torch.no_grad()
def test_logits_are_those_of_the_definition(tmp_path: Path, shards: int, pickled: bool) -> None:
    weights = small.write_checkpoint(tmp_path / "model", shards=shards, pickled=pickled)
    model = load(tmp_path / "model")
    images = [pixels(1), pixels(2)]
    ids = prompt_ids(1, 2)
    wanted = literal.logits(weights, ids, images)
    own = model(torch.tensor([ids]), pixel_values=torch.stack(images)).logits[0]
    assert float((own - wanted).abs().max()) < TOLERANCE


def test_the_published_shapes_have_the_published_sizes() -> None:
    """Table 1 of arXiv:2308.12966: 7.7 B parameters of the language model, 0.08 B of the adapter, 9.6 B in all."""
    visual = {
        "heads": 16,
        "image_size": 448,
        "image_start_id": 151857,
        "layers": 48,
        "mlp_ratio": 4.9231,
        "output_dim": 4096,
        "patch_size": 14,
        "width": 1664,
    }
    sizes = {"hidden_size": 4096, "intermediate_size": 22016, "kv_channels": 128, "vocab_size": 151936}
    depth = {"num_attention_heads": 32, "num_hidden_layers": 32, "seq_length": 2048}
    stored = small.published_config(**sizes, **depth, visual=visual)
    model = dummy_model(QwenVLConfig(**translated(stored)), "auto", torch.device("meta"), 0)

    def billions(*modules: torch.nn.Module) -> float:
        return sum(parameter.numel() for module in modules for parameter in module.parameters()) / 1e9

    assert round(billions(model.model.language_model, model.lm_head), 1) == 7.7
    assert round(billions(model.model.visual.attn_pool), 2) == 0.08
    assert 9.6 <= billions(model) < 9.7
    assert model.config.image_token_id == 151859 and model.config.turn_end_ids == (151644, 151645)


# -- what a checkpoint is ----------------------------------------------------------------------------------------------


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    small.write_checkpoint(tmp_path / "model")
    ends = HFModel(load_model(EngineConfig(model=str(tmp_path / "model")))).eos_ids
    assert ends == {small.END_OF_TEXT, small.END_OF_TEXT + 1, small.END_OF_TEXT + 2}


@pytest.mark.parametrize("pickled", [False, True])
def test_check_reads_what_a_checkpoint_is(tmp_path: Path, pickled: bool) -> None:
    weights = small.write_checkpoint(tmp_path / "model", shards=3, pickled=pickled)
    found = check_model(EngineConfig(model=str(tmp_path / "model"), device="cpu"), adapter_rank=8)
    assert found.problems == () and found.num_files == 3
    assert (found.model_type, found.text_model, found.video) == ("qwen_vl", "qwen2", False)
    assert found.num_parameters == sum(tensor.numel() for tensor in weights.values())
    assert found.max_context == small.published_config()["seq_length"]


@pytest.mark.parametrize(
    ("dynamic_ntk", "logn", "longest"), [(False, True, 1024), (True, False, 1024), (False, False, 2048)]
)
def test_attention_that_depends_on_the_length_limits_it(
    tmp_path: Path, dynamic_ntk: bool, logn: bool, longest: int
) -> None:
    small.write_checkpoint(tmp_path / "model", use_dynamic_ntk=dynamic_ntk, use_logn_attn=logn)
    assert read_config(str(tmp_path / "model")).text_config.max_position_embeddings == longest


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "broken",
    [lambda content: b"", lambda content: content[:5000], lambda content: b"<html>" + content, None],
    ids=["empty", "truncated", "other", "missing"],
)
def test_a_broken_shard_is_named_in_one_line(
    tmp_path: Path, pickled: bool, broken: Callable[[bytes], bytes] | None
) -> None:
    small.write_checkpoint(tmp_path / "model", shards=2, pickled=pickled)
    (shard,) = (tmp_path / "model").glob("*-00002-of-*")
    content = shard.read_bytes()
    shard.unlink()
    if broken is not None:
        shard.write_bytes(broken(content))
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu")
    (problem,) = check_model(config, adapter_rank=8).problems
    assert problem.startswith(f"{shard.name}, a file of its weights, ") and "\n" not in problem
    assert not pickled or problem.endswith(
        ("is missing; download it", "it is truncated, or torch.save has not written it; download it again")
    )
    with pytest.raises(BadConfig) as raised:
        load_model(config)
    assert str(raised.value) == f"cannot load the weights of {config.model!r}: {problem}"


def without(section: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {name: value for name, value in config.items() if name != section}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("visual"), "without a 'visual' section in config.json is a text model, which has no image input"),
        (without("hidden_size"), "its config.json has no field 'hidden_size'"),
        (lambda config: {**config, "no_bias": False}, "Qwen-VL with no_bias = False is not supported; supported: True"),
        (lambda config: {**config, "rotary_pct": 0.25}, "rotary_pct = 0.25 is not supported; supported: 1.0"),
        (lambda config: {**config, "visual": {**config["visual"], "output_dim": 128}}, "visual.output_dim = 128"),
        (lambda config: {**config, "visual": [1]}, "its config.json is not valid"),
        (lambda config: {**config, "quantization_config": GPTQ}, "(quant_method 'gptq') is not supported"),
    ],
    ids=["text model", "no size", "biases", "partial rotary", "other width", "no object", "Int4"],
)
def test_other_models_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    small.write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(change(small.published_config())))
    with pytest.raises(VLoraError, match=re.escape(message)) as raised:
        read_config(str(tmp_path / "model"))
    assert isinstance(raised.value, BadConfig | UnsupportedModel) and "\n" not in str(raised.value)
