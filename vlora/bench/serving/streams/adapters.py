"""Adapters of the bench: ordinary and activated ones with equal factors, each with a head."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, get_peft_model

from fusion.embedded import checkpoint_path
from heads import HeadSpec, TaskHead, save_heads
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

Kind = Literal["ordinary", "activated"]

NUM_ADAPTERS = 4
HEAD = "kind"
RANK = 8
QUESTION = "what shape is shown ?"
_INVOCATION = "what shape"  # the first words of the question: everything before it is shared


def adapter_name(kind: Kind, number: int) -> str:
    return f"{kind}-{number}"


def write_adapters(folder: Path) -> None:
    """Write `NUM_ADAPTERS` adapters of each kind with random factors, on every linear layer of the language model."""
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    invocation = tuple(InputProcessor.from_pretrained(checkpoint_path()).tokenizer.encode(_INVOCATION))
    for number in range(NUM_ADAPTERS):
        for kind in ("ordinary", "activated"):
            torch.manual_seed(number)
            model = load_model(EngineConfig(model=str(checkpoint_path()), dtype="float32"))
            config = LoraConfig(
                r=RANK,
                lora_alpha=RANK,
                target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
                init_lora_weights=False,
                task_type="CAUSAL_LM",
                alora_invocation_tokens=[*invocation] if kind == "activated" else None,
            )
            path = folder / f"{kind}-{number}"
            get_peft_model(model, config).save_pretrained(str(path))
            hidden = model.config.text_config.hidden_size
            spec = HeadSpec(
                name=HEAD,
                task="classification",
                labels=("disc", "board", "rings"),
                prompt=QUESTION,
                num_frames=1,
                hidden_size=hidden,
            )
            save_heads(path, {HEAD: TaskHead(spec, torch.randn(3, hidden), torch.zeros(3))})
