"""Adapters by the module names of Qwen-VL's published code, made by PEFT, with the weights that they give the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel
from torch import Tensor, nn

from tests.oracle import save_adapter
from tests.qwen_vl import checkpoint as small

# As finetune.py of the published repository.
_FINETUNED = ["c_attn", "attn.c_proj", "w1", "w2"]
_LANGUAGE = r".*transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(w1|w2|c_proj))"
_VISION = (
    r".*transformer\.visual\.(transformer\.resblocks\.\d+\.(attn\.(in_proj|out_proj)|mlp\.(c_fc|c_proj))"
    r"|attn_pool\.(kv_proj|attn\.out_proj))"
)
_SECOND = r"transformer.h.1.attn.c_attn"

CONFIGS: Mapping[str, PeftConfig] = {
    "finetuned": LoraConfig(r=8, lora_alpha=4, target_modules=_FINETUNED),
    "everywhere": LoraConfig(
        r=12,
        lora_alpha=16,
        use_rslora=True,
        target_modules=f"({_LANGUAGE}|{_VISION})",
        rank_pattern={_SECOND: 5},
        alpha_pattern={_SECOND: 20},
    ),
    "dora": LoraConfig(r=4, use_dora=True, target_modules=["c_attn", "w2"]),
    "biased": LoraConfig(r=4, bias="lora_only", target_modules=["c_attn", "mlp.c_proj"]),
    "saved": LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["wte", "lm_head"]),
    "ia3": IA3Config(
        target_modules=r".*transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(w1|c_proj))",
        feedforward_modules=r".*transformer\.h\.\d+\.mlp\.c_proj",
    ),
}


def published_modules(weights: Mapping[str, Tensor]) -> nn.Module:
    """Modules with the published names and types, without a forward. PEFT makes and merges adapters on them."""
    root = nn.Module()
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2:
            made: nn.Module = nn.Embedding(*tensor.shape) if path.endswith("wte") else nn.Linear(*tensor.shape[::-1])
            if isinstance(made, nn.Linear) and f"{path}.bias" not in weights:
                made.bias = None  # type: ignore[assignment]
            at, _, own = path.rpartition(".")
            _module(root, at).add_module(own, made)
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        if (found := getattr(_module(root, path), leaf, None)) is not None:
            found.data = tensor.clone()
        else:
            setattr(_module(root, path), leaf, nn.Parameter(tensor.clone()))
    return root


def _module(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def make_adapter(weights: Mapping[str, Tensor], config: PeftConfig, folder: Path) -> dict[str, Tensor]:
    """Write an adapter with random values. Returns the model's weights with the adapter merged, by PEFT."""
    base = published_modules(weights)
    save_adapter(base, config, folder)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).merge_and_unload()
    found: dict[str, Tensor] = merged.state_dict()
    assert found.keys() == weights.keys() and len(found["lm_head.weight"]) == small.VOCAB
    return found
