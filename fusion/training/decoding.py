"""What a model says: greedy decoding of many prompts at once, through the model that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vlora.models.hf_adapter import Seam


class Prompt(NamedTuple):
    """embeddings [tokens, hidden], image features among them; positions [1 or 3, tokens]."""

    embeddings: torch.Tensor
    positions: torch.Tensor


@torch.no_grad()
def greedy(seam: Seam, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """The likeliest token after the other, up to what ends an answer or `limit` tokens; the end is left out."""
    # One length at a time: without padding there is no mask to get wrong, and a domain's prompts are mostly alike.
    lengths: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt.embeddings), []).append(row)
    said: dict[int, tuple[int, ...]] = {}
    for rows in lengths.values():
        said.update(zip(rows, _alike(seam, [prompts[row] for row in rows], limit), strict=True))
    return [said[row] for row in range(len(prompts))]


def _alike(seam: Seam, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """The same for prompts of one length."""
    embeds = torch.stack([prompt.embeddings for prompt in prompts])
    places = torch.stack([prompt.positions for prompt in prompts], 1).to(embeds.device)
    following = places.amax((0, 2))[None, :, None] + 1  # behind an image, positions are not the number of tokens
    cache = None
    said: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    for _ in range(limit):
        output = seam.text_model(
            inputs_embeds=embeds,
            position_ids=places if seam.family.mrope else places[0],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        tokens = seam.lm_head(output.last_hidden_state[:, -1]).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if token in seam.eos_ids:
                going.discard(row)
            elif row in going:
                said[row].append(token)
        if not going:
            break
        embeds = seam.embed(tokens)[:, None]
        places = following.expand(len(places), -1, -1)
        following = following + 1
    return [tuple(tokens) for tokens in said]
