"""Greedy decoding of many prompts in one batch, with the model that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusion.training.activation import OFFSETS
from fusion.training.embedding import TextInput, batch_arguments
from vlora.models.hf_model import HFModel


class Prompt(NamedTuple):
    """positions: [1 or 3, tokens]."""

    input: TextInput
    positions: torch.Tensor


@torch.no_grad()
def greedy(hf_model: HFModel, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """Decode greedily until an end token, which is left out, or `limit` tokens."""
    # One length at a time needs no padding and no mask; a domain's prompts mostly have the same length.
    lengths: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt.input.embeddings), []).append(row)
    decoded: dict[int, tuple[int, ...]] = {}
    for rows in lengths.values():
        decoded.update(zip(rows, _decode_one_length(hf_model, [prompts[row] for row in rows], limit), strict=True))
    return [decoded[row] for row in range(len(prompts))]


def _decode_one_length(hf_model: HFModel, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """Decode prompts of one length."""
    arguments = batch_arguments([prompt.input for prompt in prompts])
    places = torch.stack([prompt.positions for prompt in prompts], 1).to(hf_model.device)
    following = places[:, :, -1:] + 1  # as `Positions` of the engine; after an image this is not the number of tokens
    # Counted from the end, so an activated adapter applies to each later token too.
    offsets = {name: value for name, value in arguments.items() if name == OFFSETS}
    cache = None
    decoded: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    for _ in range(limit):
        output = hf_model.text_model(
            **arguments,
            position_ids=places if hf_model.family.mrope else places[0],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        tokens = hf_model.lm_head(output.last_hidden_state[:, -1]).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if token in hf_model.eos_ids:
                active.discard(row)
            elif row in active:
                decoded[row].append(token)
        if not active:
            break
        arguments = {"inputs_embeds": hf_model.embed(tokens)[:, None], **offsets}
        places = following
        following = following + 1
    return [tuple(tokens) for tokens in decoded]
