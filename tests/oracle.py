"""The oracle of the engine tests: transformers + PEFT, one request at a time, on the same weights."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

from tests.families import LANGUAGE_LINEARS, Prompt, vision_linears

# Ranks 4, 8 and 64, a rank pattern with an alpha pattern, rsLoRA, and targets from two projections to the whole model.
ADAPTERS = ("narrow4", "wide8", "everywhere64", "patterned16")


def adapter_configs(family: str) -> dict[str, LoraConfig]:
    everywhere = f"({LANGUAGE_LINEARS}|{vision_linears(family)})"
    first_query = r"layers.1.self_attn.q_proj"
    settings: dict[str, dict[str, Any]] = {
        "narrow4": {"r": 4, "lora_alpha": 8, "target_modules": r".*language_model.*\.(q_proj|v_proj)"},
        "wide8": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": LANGUAGE_LINEARS},
        "everywhere64": {"r": 64, "lora_alpha": 32, "use_rslora": True, "target_modules": everywhere},
        "patterned16": {
            "r": 16,
            "lora_alpha": 16,
            "target_modules": LANGUAGE_LINEARS,
            "rank_pattern": {first_query: 5},
            "alpha_pattern": {first_query: 20},
        },
    }
    return {name: LoraConfig(**values, init_lora_weights=False) for name, values in settings.items()}


class Oracle:
    """A model with its adapters under PEFT. `save` writes the adapters for the engine.

    scale: standard deviation of the random factors' entries, before division by the square root of their width.
    configs: the adapters by name; by default those of `adapter_configs`. DoRA's magnitudes are 0.6 to 1.6 of the norms.
    """

    def __init__(
        self, family: str, model: Any, scale: float = 0.5, configs: Mapping[str, LoraConfig] | None = None
    ) -> None:
        self.peft: PeftModel | None = None
        self._names = tuple(configs or ADAPTERS)
        for name, config in (configs or adapter_configs(family)).items():
            if self.peft is None:
                self.peft = get_peft_model(copy.deepcopy(model), config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        assert self.peft is not None
        with torch.no_grad():
            for name, parameter in self.peft.named_parameters():
                if "lora_" in name:
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    if "magnitude" in name:
                        parameter.mul_(0.6 + torch.rand(parameter.shape, generator=generator))
                    else:
                        parameter.copy_(
                            torch.randn(parameter.shape, generator=generator) * scale / parameter.shape[1] ** 0.5
                        )
        self.peft.eval()

    def save(self, folder: Path) -> dict[str, str]:
        assert self.peft is not None
        self.peft.save_pretrained(str(folder))
        return {name: str(folder / name) for name in self._names}

    @torch.no_grad()
    def generate(self, prompt: Prompt, adapter: str | None, num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits from which they were chosen [num_tokens, vocab]."""
        assert self.peft is not None
        arguments = {
            **prompt.kwargs,
            "max_new_tokens": num_tokens,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        if adapter is None:
            with self.peft.disable_adapter():
                out = self.peft.generate(**arguments)
        else:
            self.activate(adapter)
            out = self.peft.generate(**arguments)
        logits = torch.stack([step[0] for step in out.logits]).float()
        return logits.argmax(-1).tolist(), logits

    def activate(self, adapter: str) -> None:
        assert self.peft is not None
        self.peft.set_adapter(adapter)


def save_adapter(model: Any, config: PeftConfig, folder: Path) -> str:
    """Write an adapter with random values in all of its parameters. Returns the folder."""
    peft = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                if parameter.ndim == 2:
                    parameter.copy_(noise * 0.5 / parameter.shape[1] ** 0.5)
                else:
                    parameter.add_(noise * 0.1)
    peft.save_pretrained(str(folder))
    return str(folder)


@torch.no_grad()
def peft_answer(model: Any, folder: str | None, prompt: Prompt, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """As `Oracle.generate`, with the adapter in a folder, or the model alone."""
    own = copy.deepcopy(model)
    peft = own if folder is None else PeftModel.from_pretrained(own, folder).eval()
    out = peft.generate(
        **prompt.kwargs,
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack([step[0] for step in out.logits]).float()
    return logits.argmax(-1).tolist(), logits
