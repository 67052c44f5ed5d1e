"""Qwen-VL read from checkpoints in the published layout, against the literal implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model, load_model
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


@torch.no_grad()
def test_generated_tokens_are_those_of_the_definition(tmp_path: Path) -> None:
    weights = small.write_checkpoint(tmp_path / "model")
    model = load(tmp_path / "model")
    ids = prompt_ids(2, 1)
    wanted, logits = literal.generate(weights, ids, [pixels(3)], 8)
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pixel_values=pixels(3)[None],
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences[0, len(ids) :].tolist() == wanted
    assert float((torch.cat(out.logits) - logits).abs().max()) < TOLERANCE


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
