"""Inputs of the text model: embeddings of tokens with image features in their places, and Qwen3-VL's deepstack.

A deepstack model adds further features of its vision tower to the image tokens after each of its first layers. They
are stored beside the features that replace the tokens: one row of hidden * (1 + levels) numbers per image token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fusion.training.activation import OFFSETS
from vlora.models.hf_model import HFModel, VisionFeatures


class TextInput(NamedTuple):
    """The text model's input for one sample.

    embeddings: [tokens, hidden]. visual: mask of the image tokens [tokens]. deepstack: of each level, the features
    added to the image tokens [image tokens, hidden]; empty for models without deepstack. start: index of the first
    token that an activated adapter applies to; None for ordinary adapters.
    """

    embeddings: torch.Tensor
    visual: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]
    start: int | None


def features_of_tokens(features: VisionFeatures) -> torch.Tensor:
    """All features of one picture, [image tokens, hidden * (1 + levels)]."""
    return torch.cat([features.rows, *features.deepstack], 1)


def embed(hf_model: HFModel, ids: torch.Tensor, seen: torch.Tensor, start: int | None) -> TextInput:
    """Embed tokens [n] with the features of their image tokens [image tokens, hidden * (1 + levels)]. start: as in the
    result."""
    embeddings = hf_model.embed(ids.to(hf_model.device))
    visual = (ids == hf_model.image_token_id).to(hf_model.device)
    rows, *deepstack = seen.to(embeddings).split(hf_model.hidden_size, 1)
    return TextInput(embeddings.masked_scatter(visual[:, None], rows), visual, tuple(deepstack), start)


def batch_arguments(inputs: Sequence[TextInput]) -> dict[str, Any]:
    """The text model's arguments for a batch, padded at the end to the longest sample."""
    embeddings = nn.utils.rnn.pad_sequence([one.embeddings for one in inputs], batch_first=True)
    arguments: dict[str, Any] = {"inputs_embeds": embeddings}
    if levels := list(map(torch.cat, zip(*(one.deepstack for one in inputs), strict=True))):
        arguments["visual_pos_masks"] = nn.utils.rnn.pad_sequence([one.visual for one in inputs], batch_first=True)
        arguments["deepstack_visual_embeds"] = levels
    if starts := [one.start for one in inputs if one.start is not None]:
        arguments[OFFSETS] = [embeddings.shape[1] - start for start in starts]
    return arguments
