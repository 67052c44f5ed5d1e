"""Small checkpoints with random weights in the layout of the hub repositories that the README names.

`make(name, folder)` writes one. Files, their names and places, names and types of tensors, keys of configurations,
special tokens, the size of vocabularies and pictures are as published, or as a version of transformers saves them.
Widths and numbers of layers are reduced; the chat templates have the structure of the published ones in other words.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from tests.hub import vocabularies
from tests.hub.vocabularies import PUBLISHED
from tests.models.grouped_checkpoints import Layout, stored_layer
from tests.qwen_vl import checkpoint as qwen_vl

SavedBy = Literal["hub", "4.49", "4.57", "5.23"]
Files = dict[str, Any]
"""The files beside the weights by name: text, bytes, or values that become JSON."""

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 128, 256, 2, 2, 1
TOWER, TOWER_INNER, TOWER_LAYERS, TOWER_HEADS = 64, 96, 3, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One repository.

    config, image, video, generation, quantization: entries of published.json. changes: fields of the config.
    tokenizer: qwen or llama; special, plain: its added tokens. tokenizer_class, processor: names of classes.
    vision_template: of chat_template.json; text_template: of tokenizer_config.json, None if it has none.
    processor_fields: of processor_config.json. shards: files with weights.
    """

    config: str
    image: str
    generation: str
    processor: str
    vision_template: str
    text_template: str | None
    shards: int = 1
    tokenizer: Literal["qwen", "llama"] = "qwen"
    special: tuple[str, ...]
    plain: tuple[str, ...]
    tokenizer_class: str = "Qwen2Tokenizer"
    added_files: bool = False
    video: str | None = None
    processor_fields: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: str | None = None


def _read_checkpoints() -> dict[str, Published]:
    """The rows of published.json. `like`: another row, of which a row has all other fields."""
    rows: dict[str, dict[str, Any]] = {}
    for name, row in PUBLISHED["checkpoints"].items():
        rows[name] = rows.get(row.get("like"), {}) | {field: value for field, value in row.items() if field != "like"}
    tokens = {name: tuple(values) for name, values in PUBLISHED["tokens"].items()}
    return {
        name: Published(
            **{**row, "special": tokens[row.get("special", "qwen2")], "plain": tokens[row.get("plain", "none")]}
        )
        for name, row in rows.items()
    }


CHECKPOINTS: Mapping[str, Published] = _read_checkpoints()
QWEN_VL = ("Qwen-VL-Chat", "Qwen-VL")
NAMES = (*CHECKPOINTS, *QWEN_VL)


def savers(name: str) -> tuple[SavedBy, ...]:
    """Origin of the files of a checkpoint: its publisher, or a version of transformers that saved it."""
    if name in QWEN_VL or name.endswith(("-early", "-A3B")):
        return ("hub",)
    if CHECKPOINTS[name].quantization:
        return ("hub", "4.57")  # as quantizing tools save with it
    return ("hub", "4.57", "5.23") if name.startswith("Qwen3") else ("hub", "4.49", "4.57", "5.23")


def make(name: str, folder: Path, saved_by: SavedBy = "hub", *, restored: bool = False) -> Path:
    """Write a checkpoint.

    Args:
        name: One of `NAMES`.
        folder: Where, created if necessary.
        saved_by: `hub` for the published files, or the version of transformers that has loaded and saved them.
        restored: Whether quantized weights are written as the values for which they stand, in float32.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if name in QWEN_VL:
        _make_qwen_vl(folder, chat=name == "Qwen-VL-Chat")
        return folder
    row = CHECKPOINTS[name]
    config = reduced(row)
    if restored:
        _write_weights(folder, _weights(row, config, restored=True), 1)
        del config["quantization_config"]
        write(folder, {"config.json": config, "generation_config.json": dict(PUBLISHED["generation"][row.generation])})
        return folder
    files = _files(row, config)
    if saved_by in ("4.49", "4.57"):
        files = _as_saved(files, row, saved_by)
    write(folder, files)
    if saved_by == "5.23":
        _save_again(folder, files)
    _write_weights(folder, _weights(row, config), row.shards if saved_by == "hub" else 1)
    return folder


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False))


def template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text().removesuffix("\n")


def reduced(row: Published) -> dict[str, Any]:
    """A published config with small widths and few layers."""
    config: dict[str, Any] = copy.deepcopy(dict(PUBLISHED["config"][row.config])) | dict(row.changes)
    text, vision = config.get("text_config", config), config["vision_config"]
    text |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    if row.config == "qwen2.5-vl-7b" and row.quantization:
        text["num_key_value_heads"] = HEADS  # groups of 128 values need layers that wide
    if "head_dim" in text:  # Qwen3-VL's does not follow from its width
        vision |= {"deepstack_visual_indexes": [0, 1, 2]}
    elif "rope_scaling" in text:
        text["rope_scaling"] = {**text["rope_scaling"], "mrope_section": [8, 12, 12]}
    if "num_experts" in text:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if "embed_dim" in vision:
        vision |= {"depth": TOWER_LAYERS, "embed_dim": TOWER, "num_heads": TOWER_HEADS, "hidden_size": HIDDEN}
    elif "depth" in vision:
        vision |= {"depth": TOWER_LAYERS, "hidden_size": TOWER, "num_heads": TOWER_HEADS}
        vision |= {"intermediate_size": TOWER_INNER, "out_hidden_size": HIDDEN}
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [1]
    else:
        vision |= {"hidden_size": TOWER, "intermediate_size": TOWER_INNER, "num_hidden_layers": TOWER_LAYERS}
        vision |= {"num_attention_heads": TOWER_HEADS}
    if row.quantization:
        stored = dict(PUBLISHED["quantization"][row.quantization])
        if isinstance(stored.get("ignore"), str):
            parts = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            blocks = [f"visual.blocks.{n}.{part}" for n in range(TOWER_LAYERS) for part in parts]
            stored["ignore"] = [*blocks, "visual.merger.mlp.0", "visual.merger.mlp.2", "lm_head"]
        config["quantization_config"] = stored
    return config


@functools.cache
def _added(tokenizer: str, special: tuple[str, ...], plain: tuple[str, ...]) -> list[dict[str, Any]]:
    """The added tokens, of which those of Qwen follow its ranks."""
    places = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32_000, "<pad>": 32_001}
    if tokenizer == "qwen":
        places = {name: 151_643 + number for number, name in enumerate(special + plain)}
    return [vocabularies.added_token(places[name], name, special=name in special) for name in special + plain]


@functools.cache
def _vocabulary(tokenizer: str, special: tuple[str, ...], plain: tuple[str, ...]) -> Mapping[str, str | bytes]:
    files: Callable[..., Any] = vocabularies.qwen_files if tokenizer == "qwen" else vocabularies.llama_files
    return files(_added(tokenizer, special, plain))  # type: ignore[no-any-return]


def _files(row: Published, config: Mapping[str, Any]) -> Files:
    """The files beside the weights, as published."""
    added = _added(row.tokenizer, row.special, row.plain)
    qwen = row.tokenizer == "qwen"
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    if not qwen:
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    extra = [name for name in row.special if name not in names.values()]
    tokenizer_config = {
        **({"add_prefix_space": False} if qwen else {"add_bos_token": True, "add_eos_token": False, "legacy": False}),
        "added_tokens_decoder": {
            str(one["id"]): {key: value for key, value in one.items() if key != "id"} for one in added
        },
        "additional_special_tokens": extra,
        **names,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32_768 if qwen else 4_096,
        "padding_side": "left",
        "processor_class": row.processor,
        "split_special_tokens": False,
        "tokenizer_class": row.tokenizer_class,
    }
    if row.text_template is not None:
        tokenizer_config["chat_template"] = template(row.text_template)
    generation = dict(PUBLISHED["generation"][row.generation])
    if row.generation == "llava" and qwen:
        generation |= {"bos_token_id": 151_643, "eos_token_id": 151_645, "pad_token_id": 151_643}
    files: Files = {
        "config.json": dict(config),
        "generation_config.json": generation,
        "preprocessor_config.json": dict(PUBLISHED["image"][row.image]),
        "chat_template.json": {"chat_template": template(row.vision_template)},
        "tokenizer_config.json": tokenizer_config,
        **_vocabulary(row.tokenizer, row.special, row.plain),
    }
    if row.added_files:
        files["added_tokens.json"] = {one["content"]: one["id"] for one in added if one["id"] > 2}
        kept = {key: value for key, value in names.items() if value is not None}
        files["special_tokens_map.json"] = {**kept, "additional_special_tokens": extra}
    if row.video is not None:
        files["video_preprocessor_config.json"] = _video(row)
    if row.processor_fields is not None:
        files["processor_config.json"] = {**row.processor_fields, "processor_class": row.processor}
    return files


def _video(row: Published) -> dict[str, Any]:
    if row.video == "qwen3-vl":
        return dict(PUBLISHED["video"]["qwen3-vl"])
    images = PUBLISHED["image"][row.image]
    kept = {key: value for key, value in images.items() if key not in ("image_grid_pinpoints", "image_processor_type")}
    return {**kept, "do_pad": False, "video_processor_type": "LlavaOnevisionVideoProcessor"}


def _as_saved(files: Files, row: Published, version: str) -> Files:
    """Published files, loaded and saved by an older transformers."""
    old = version == "4.49"
    found = copy.deepcopy(files)
    config, tokenizer_config = found["config.json"], found["tokenizer_config.json"]
    config["transformers_version"] = found["generation_config.json"]["transformers_version"] = f"{version}.0"
    text_keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    if old:
        if "rope_scaling" in config:
            config["rope_scaling"] = {**config["rope_scaling"], "type": "default", "rope_type": "default"}
    else:
        for part in (config, config.get("text_config", {}), config["vision_config"]):
            if "torch_dtype" in part:
                part["dtype"] = part.pop("torch_dtype")
        if "text_config" not in config:  # flat and nested
            more: tuple[str, ...] = (
                "rms_norm_eps",
                "rope_theta",
                "max_position_embeddings",
                "vocab_size",
                "hidden_act",
                "sliding_window",
            )
            more += ("use_sliding_window", "max_window_layers", "attention_dropout", "use_cache", "dtype")
            more += ("bos_token_id", "eos_token_id", "initializer_range")
            scaling = {
                "mrope_section": config.pop("rope_scaling")["mrope_section"],
                "rope_type": "default",
                "type": "default",
            }
            nested = {key: config[key] for key in (*text_keys, *more)}
            config["text_config"] = {
                **nested,
                "model_type": f"{config['model_type']}_text",
                "layer_types": ["full_attention"] * LAYERS,
                "rope_scaling": scaling,
                "tie_word_embeddings": config.pop("tie_word_embeddings"),
            }
        del found["chat_template.json"]
        tokenizer_config.pop("chat_template", None)
        found["chat_template.jinja"] = template(row.vision_template)
        images = found["preprocessor_config.json"]
        if "min_pixels" in images:
            images["size"] = {"shortest_edge": images["min_pixels"], "longest_edge": images["max_pixels"]}
        if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
            kept = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
            found["video_preprocessor_config.json"] = {
                **{key: images[key] for key in kept},
                "processor_class": row.processor,
                "video_processor_type": "Qwen2VLVideoProcessor",
            }
    added = _added(row.tokenizer, row.special, row.plain)
    found["added_tokens.json"] = {one["content"]: one["id"] for one in added if one["id"] > 2}
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
    found["special_tokens_map.json"] = {
        key: tokenizer_config[key] for key in names if tokenizer_config[key] is not None
    }
    if old and row.video == "onevision":
        found["video_processor/preprocessor_config.json"] = found.pop("video_preprocessor_config.json")
    return found


def _save_again(folder: Path, files: Files) -> None:
    """Load and save with the installed transformers, except for the processor, which needs torchvision."""
    for kind in (AutoConfig, AutoTokenizer):
        loaded = kind.from_pretrained(folder, trust_remote_code=False)
        if kind is AutoTokenizer:
            loaded.chat_template = None
            images = AutoImageProcessor.from_pretrained(folder).to_dict()
            for name in files:
                if name not in ("config.json", "generation_config.json"):
                    (folder / name).unlink()
        else:
            loaded.architectures = files["config.json"]["architectures"]
        loaded.save_pretrained(folder)
    own = {**files.get("processor_config.json", {}), "image_processor": images}
    own["processor_class"] = files["preprocessor_config.json"]["processor_class"]
    videos = files.get("video_preprocessor_config.json")
    if videos is None and own["processor_class"].startswith("Qwen2"):
        videos = {**files["preprocessor_config.json"], "video_processor_type": "Qwen2VLVideoProcessor"}
        videos.pop("image_processor_type")
    if videos is not None:
        own["video_processor"] = videos
    write(folder, {"processor_config.json": own, "chat_template.jinja": files["chat_template.json"]["chat_template"]})


def _weights(row: Published, config: Mapping[str, Any], *, restored: bool = False) -> dict[str, Tensor]:
    """Random weights by their published names and in the published type."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        made: Any = AutoConfig.for_model(**copy.deepcopy(plain))
        model = AutoModelForImageTextToText.from_config(made, trust_remote_code=False)
    shapes = dict(model.named_parameters())
    text = config.get("text_config", config)
    if text.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    dtype = getattr(torch, config.get("torch_dtype") or text.get("torch_dtype") or text["dtype"])
    generator = torch.Generator().manual_seed(0)
    weights = {
        # A part of the name that transformers drops when it loads, and saves only what it has loaded with.
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): random_weight(
            name, parameter.shape, generator
        ).to(dtype)
        for name, parameter in revert_weight_conversion(model, shapes).items()
    }
    if not row.quantization:
        return weights
    stored, plain = _quantized(weights, row.quantization, dtype)
    return plain if restored else stored


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values with which every part affects the answers."""
    value = torch.randn(tuple(shape), generator=generator)
    if len(shape) < 2:
        return value * 0.1 + (0.0 if name.endswith(("bias", "newline")) else 1.0)
    in_rows = any(part in name for part in ("embed_tokens", "position_embedding", "pos_embed"))
    return value * (0.1 if in_rows else value[0].numel() ** -0.5)


def _quantized(
    weights: dict[str, Tensor], form: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with the linear layers of the language model as a quantization stores them, and as it restores them."""
    found: dict[str, Tensor] = {}
    plain = {name: weight.float() for name, weight in weights.items()}
    for number, (name, weight) in enumerate(weights.items()):
        if not re.search(r"\.layers\.\d+\..*_proj\.weight$", name) or name.startswith("visual"):
            found[name] = weight
            continue
        stem = name.removesuffix("weight")
        if form in ("awq", "gptq", "w4a16"):
            method = "packed" if form == "w4a16" else form
            layout = Layout(method, 4, 128, symmetric=form != "awq")  # type: ignore[arg-type]
            d_out, d_in = weight.shape
            made, plain[name] = stored_layer(layout, d_out, d_in, number)
            if form == "gptq" and f"{stem}bias" not in weights:
                made["bias"] = torch.zeros(len(weight), dtype=torch.float16)
            if form == "w4a16":
                scale = made["weight_scale"].to(dtype)
                ratio = (scale.float() / made["weight_scale"].float()).repeat_interleave(128, 1)
                plain[name] = plain[name] * ratio
                made["weight_scale"] = scale
        elif form == "bnb":
            packed = torch.randint(0, 256, (weight.numel() // 2, 1), dtype=torch.uint8)
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
            made = {
                "weight": packed,
                "weight.absmax": torch.zeros(weight.numel() // 64, dtype=torch.uint8),
                "weight.quant_map": torch.linspace(-1, 1, 16),
                "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(json.dumps(state).encode()), dtype=torch.uint8
                ),
            }
        else:
            limit, kind = (448.0, torch.float8_e4m3fn) if form == "fp8" else (127.0, torch.int8)
            scale = (weight.float().abs().amax(1, keepdim=True) / limit).to(dtype)
            values = (weight.float() / scale.float()).clamp(-limit, limit)
            made = {"weight": (values if form == "fp8" else values.round()).to(kind), "weight_scale": scale}
            plain[name] = made["weight"].float() * scale.float()
        found |= {f"{stem}{suffix}": tensor for suffix, tensor in made.items()}
    return found, plain


def _write_weights(folder: Path, weights: Mapping[str, Tensor], shards: int) -> None:
    """Files of about the same size, and their index if there are several."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    placed = {name: names[place * shards // len(weights)] for place, name in enumerate(weights)}
    for file in names:
        part = {name: weights[name].contiguous() for name in weights if placed[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": sum(one.nbytes for one in weights.values())}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _make_qwen_vl(folder: Path, *, chat: bool) -> None:
    """The first Qwen-VL: pickled shards, tiktoken's vocabulary, and files of code, which must not run."""
    inner, side = INNER, 2 * TOWER
    changes = {
        **{"hidden_size": HIDDEN, "intermediate_size": 2 * inner, "num_hidden_layers": LAYERS, "vocab_size": 151_936},
        **{"num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS, "bf16": True, "torch_dtype": "bfloat16"},
        **{"seq_length": 2_048, "max_position_embeddings": 8_192, "transformers_version": "4.31.0"},
    }
    visual: dict[str, Any] = {
        "heads": TOWER_HEADS,
        "image_size": 448,
        "image_start_id": 151_857,
        "layers": LAYERS,
        "patch_size": 14,
    }
    visual |= {"mlp_ratio": 4.9231, "output_dim": HIDDEN, "width": side}
    config = qwen_vl.published_config(**changes, visual=visual)
    weights = {name: one.bfloat16() for name, one in qwen_vl.random_weights(0, config).items()}
    qwen_vl.write_checkpoint(folder, weights, shards=10, pickled=True, chat=chat, **changes, visual=visual)
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = {"eos_token_id": 151_643, "pad_token_id": 151_643}
    code = ("configuration_qwen", "modeling_qwen", "qwen_generation_utils", "tokenization_qwen", "visual")
    stop = 'raise RuntimeError("code of a checkpoint was run")\n'
    write(
        folder,
        {
            "generation_config.json": {**generation, **ends},
            "qwen.tiktoken": vocabularies.ranks_file().read_bytes(),
            "SimSun.ttf": b"",
            **{f"{name}.py": stop for name in code},
        },
    )
