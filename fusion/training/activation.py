"""Activated adapters (aLoRA) in training: the tokens they begin at, and their layers' offsets, as in PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from fusion.plan.schema import LoraPlan
from vlora.errors import BadPlan
from vlora.models.processing import InputProcessor

OFFSETS = "alora_offsets"
"""PEFT's name of the argument of LoRA layers: per row, the number of tokens at its end that the adapter applies to."""


def invocation_tokens(lora: LoraPlan, processor: InputProcessor) -> tuple[int, ...]:
    """The tokens at which a plan's adapters begin: the plan's, or those that the chat template adds after a question.

    Empty for ordinary adapters. Raises BadPlan if there are no such tokens.
    """
    if not lora.activated:
        return ()
    text = _generation_prompt(processor) if lora.invocation is None else lora.invocation
    ids = tuple(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise BadPlan(
            "lora.activated: the base's chat template adds nothing after the question; set lora.invocation to words "
            "that all questions contain"
        )
    return ids


def pass_offsets(text_model: Any) -> None:
    """Let a text model with LoRA layers take `alora_offsets` as an argument, which it passes on to its layers.

    PEFT's own way is a context around one forward, which a model with gradient checkpointing has left when it computes
    its layers again. A layer's arguments are kept until then, and its attention gets them before its other parts run.
    """
    for layer in text_model.layers:
        _Offsets().attach(layer)


class _Offsets:
    """The offsets of one decoder layer's current forward."""

    def __init__(self) -> None:
        self._current: list[int] | None = None

    def attach(self, layer: Any) -> None:
        layer.self_attn.register_forward_pre_hook(self._take, with_kwargs=True)
        for module in layer.modules():
            if isinstance(module, LoraLayer) and isinstance(module, nn.Module):
                module.register_forward_pre_hook(self._give, with_kwargs=True)

    def _take(self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        self._current = kwargs[OFFSETS]
        return args, {name: value for name, value in kwargs.items() if name != OFFSETS}

    def _give(self, linear: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, OFFSETS: self._current}


def _generation_prompt(processor: InputProcessor) -> str:
    """The text that the chat template adds after the last turn, which begins the answer."""
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "question"}]}]
    turn, prompt = (
        str(processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=begin))
        for begin in (False, True)
    )
    return prompt.removeprefix(turn) if prompt.startswith(turn) else ""
