"""Models and adapters of real shapes with random weights: speed does not depend on the values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2VLConfig

from heads import HeadSpec, TaskHead, save_heads
from vlora.errors import BadConfig
from vlora.models.families import encode_patches, family_of, placeholder_count
from vlora.models.processing import vision_input
from vlora.parallel.layer_sharding import COLUMN_PARALLEL, ROW_PARALLEL
from vlora.types import VisionInput

Vision = Literal["tower", "qwen2-vl", "none"]
"""The vision tower of a dummy model: one in proportion to the language model, Qwen2-VL's of every size, or one of
negligible time and memory."""

_LAYERS = 24
"""Number of layers of Qwen2-0.5B."""

_HASHES = itertools.count()


class _Tower(NamedTuple):
    depth: int  # number of blocks
    embed_dim: int  # width of a block
    num_heads: int
    mlp_ratio: int = 4  # width of a block's MLP relative to `embed_dim`


_QWEN_TOWER = _Tower(depth=32, embed_dim=1280, num_heads=16)

_SMALL_TOWER, _NO_TOWER = _Tower(2, 128, 4), _Tower(1, 64, 2, mlp_ratio=2)

_ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
"""No word ends an answer."""


def half_billion_config(num_layers: int = _LAYERS, vision: Vision = "tower") -> Qwen2VLConfig:
    """Qwen2-VL with the language model of Qwen2-0.5B, or its first layers.

    Args:
        num_layers: Layers of the language model.
        vision: "tower" has 98 million parameters (Qwen2-VL's blocks at ViT-B's width and depth) with all layers,
            "qwen2-vl" 665 million; with fewer layers they have the same fraction of their blocks.
    """
    real = _QWEN_TOWER._replace(depth=max(1, _QWEN_TOWER.depth * num_layers // _LAYERS))
    towers = {"tower": _scaled_tower(num_layers), "qwen2-vl": real, "none": _NO_TOWER}
    return _qwen2_vl(towers[vision], (151936, 151652), (896, 4864), num_layers, 14)


def _scaled_tower(num_layers: int) -> _Tower:
    return _Tower(depth=max(1, 12 * num_layers // _LAYERS), embed_dim=768, num_heads=12)


def small_config(vision: Vision = "tower") -> Qwen2VLConfig:
    """Qwen2-VL with 5 million parameters, and a tower of one million: for measurements that depend mainly on the
    number of adapters.
    """
    tower = _SMALL_TOWER if vision == "tower" else _NO_TOWER
    return _qwen2_vl(tower, (8192, 8187), (256, 704), 4, 4, bos_token_id=0, eos_token_id=1)


def ranks_config(num_layers: int) -> Qwen2VLConfig:
    """Layers of 15 million parameters, and a small vocabulary: for several ranks, each of which holds the complete
    output head. The tower is negligible, because ranks do not share it.
    """
    return _qwen2_vl(_NO_TOWER, (8192, 8187), (1024, 4096), num_layers, 16, bos_token_id=0, eos_token_id=1)


def served_config(num_layers: int = _LAYERS) -> Qwen2VLConfig:
    """As `half_billion_config`, with 32,768 words and an untied output head (515 million parameters in total).

    With a tied head, random weights repeat the last token for any input. The answers of this model depend on picture,
    prompt and adapter, so that errors are visible.
    """
    return _qwen2_vl(_scaled_tower(num_layers), (32768, 32760), (896, 4864), num_layers, 14, tied=False, **_ENDLESS)


def small_served_config() -> Qwen2VLConfig:
    """As `served_config` with 10 million parameters, for quick runs."""
    return _qwen2_vl(_SMALL_TOWER, (4096, 4088), (256, 1024), 8, 4, tied=False, **_ENDLESS)


def _qwen2_vl_7b() -> Qwen2VLConfig:
    more: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
    return _qwen2_vl(_QWEN_TOWER, (152064, 151652), (3584, 18944), 28, 28, (16, 24, 24), tied=False, **more)


def _qwen2_vl(
    tower: _Tower,
    vocabulary: tuple[int, int],
    widths: tuple[int, int],
    layers: int,
    heads: int,
    mrope: tuple[int, int, int] = (8, 12, 12),
    *,
    tied: bool = True,
    **text: Any,
) -> Qwen2VLConfig:
    """A Qwen2-VL with two attention heads for KV.

    Args:
        vocabulary: The number of words, and the first of the ids that mark vision input.
        widths: Of the language model, and of its MLP.
        mrope: Sections of the rotary embedding.
        tied: Whether the output head has the embeddings' weights.
        text: Further settings of the language model.
    """
    marks = vocabulary[1]
    return Qwen2VLConfig(
        text_config={
            "vocab_size": vocabulary[0],
            "hidden_size": widths[0],
            "intermediate_size": widths[1],
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(mrope)},
            **text,
        },
        vision_config={**tower._asdict(), "hidden_size": widths[0], "patch_size": 14},
        vision_start_token_id=marks,
        vision_end_token_id=marks + 1,
        image_token_id=marks + 3,
        video_token_id=marks + 4,
        tie_word_embeddings=tied,
    )


def dummy_picture(config: Any, side: int) -> VisionInput:
    """An image of random pixels, of side x side patches, or of the model's fixed size."""
    vision = config.vision_config
    if family_of(config).mrope:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        fields = {"pixel_values": torch.randn(side**2, width), "image_grid_thw": torch.tensor([[1, side, side]])}
    else:
        fields = {"pixel_values": torch.randn(1, 3, vision.image_size, vision.image_size)}
    picture = vision_input("image", fields, placeholder_count(config, fields))
    return msgspec.structs.replace(picture, num_patches=encode_patches(config, picture))


def unseen(picture: VisionInput) -> VisionInput:
    """A picture that no cache has seen: speed does not depend on the pixels, and the hash distinguishes pictures."""
    return msgspec.structs.replace(picture, content_hash=f"picture {next(_HASHES)}")


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    seed: int,
    num_blocks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write a random LoRA of one rank in PEFT's format.

    Args:
        shapes: [out, in] of each adapted layer by name.
        num_blocks: Above 1 the adapter is block-diagonal: A where ranks split a layer's inputs, B where they split its
            outputs.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (d_out, d_in) in shapes.items():
        # Deltas of about a tenth of a freshly initialised weight (0.02), which is typical of trained LoRA.
        scale = (0.002 / rank**0.5) ** 0.5
        blocks_a, blocks_b = (num_blocks, 1) if name.endswith(ROW_PARALLEL) else (1, num_blocks)
        a = torch.randn(rank, d_in // blocks_a, generator=generator)
        b = torch.randn(d_out, rank // blocks_b, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = (a * scale).to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (b * scale).to(dtype)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
        "inference_mode": True,
    }
    if num_blocks > 1:
        config["use_bdlora"] = {
            "target_modules_bd_a": list(ROW_PARALLEL),
            "target_modules_bd_b": list(COLUMN_PARALLEL),
            "nblocks": num_blocks,
        }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def write_head(folder: Path | str, name: str, hidden_size: int, labels: Sequence[str], task: str, prompt: str) -> None:
    """Add a random head of one frame to an adapter's folder."""
    spec = HeadSpec(name=name, task=task, labels=tuple(labels), prompt=prompt, num_frames=1, hidden_size=hidden_size)
    weight = torch.randn(len(labels), hidden_size, generator=torch.Generator().manual_seed(0)) * 0.02
    save_heads(str(folder), {name: TaskHead(spec, weight, torch.zeros(len(labels)))})


def random_peft(model: Any, rank: int, num_adapters: int = 1) -> Any:
    """The model, which gets random adapters of PEFT, "a0", "a1", ..., on all linear layers of its language model."""
    from peft import LoraConfig, get_peft_model  # only comparisons need it

    kinds = sorted({name.rpartition(".")[2] for name in language_shapes(model)})
    targets = rf".*language_model.*\.({'|'.join(kinds)})"
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False)
    peft: Any = get_peft_model(model, config, adapter_name="a0")
    for number in range(1, num_adapters):
        peft.add_adapter(f"a{number}", config)
    return peft.to(next(model.parameters()).dtype).eval()


def language_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of all linear layers of the language model, by name."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.language_model.")
    }


class BenchModel(NamedTuple):
    name: str  # its name on the command line
    config: Callable[[], Any]  # creates its config
    arena_bytes: int  # one half holds eight adapters of rank 64, the other half the KV of 128 short requests


def llava_config(
    vocabulary: tuple[int, int], widths: tuple[int, int], layers: int, heads: int, tower: CLIPVisionConfig, **text: Any
) -> LlavaConfig:
    """LLaVA-1.5. vocabulary, widths: as `_qwen2_vl`; the second id marks an image."""
    language = LlamaConfig(
        vocab_size=vocabulary[0],
        hidden_size=widths[0],
        intermediate_size=widths[1],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **text,
    )
    return LlavaConfig(vision_config=tower, text_config=language, image_token_index=vocabulary[1])


def clip_config(widths: tuple[int, int], depth: int, heads: int, side: int, projection: int) -> CLIPVisionConfig:
    """side: of a picture in pixels, of which 14 x 14 are a patch."""
    return CLIPVisionConfig(
        hidden_size=widths[0],
        intermediate_size=widths[1],
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=side,
        patch_size=14,
        projection_dim=projection,
    )


def _llava_13b() -> LlavaConfig:
    tower = clip_config((1024, 4096), 24, 16, 336, 768)
    return llava_config((32064, 32000), (5120, 13824), 40, 40, tower, max_position_embeddings=4096)


MODELS = {
    model.name: model
    for model in (
        BenchModel("qwen2-0.5b", half_billion_config, 2 * 2**30),
        BenchModel("qwen2-vl-7b", _qwen2_vl_7b, 8 * 2**30),
        BenchModel("llava-13b", _llava_13b, 12 * 2**30),
    )
}


def model_named(name: str) -> BenchModel:
    """The model with this name.

    Raises:
        BadConfig: There is none; the message lists the known names.
    """
    if name not in MODELS:
        raise BadConfig(f"no model named {name!r} to measure; choose one of {', '.join(MODELS)}")
    return MODELS[name]
