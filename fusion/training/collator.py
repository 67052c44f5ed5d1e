"""Forwards over samples: prompts followed by their answers, batched by similar length, and where activated adapters
(aLoRA) begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import nn

from fusion.data.samples import Target
from fusion.plan.schema import LoraPlan
from fusion.training.features import OnDisk
from fusion.training.objectives import ForwardOutputs
from heads import Box, Grid
from heads.answer import Window, into_windows, out_of_windows
from vlora.errors import BadPlan
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import InputProcessor
from vlora.types import VisionInput

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


_IGNORE = -100
_MAX_LENGTH_RATIO = 1.25  # maximum ratio of the longest to the shortest sample of one forward


class EncodedSample(NamedTuple):
    """One sample ready for training.

    ids: prompt tokens [n]. features: features of its image tokens; None if the vision side is trained. vision: the
    pictures themselves, if the vision side is trained. grids: token grid of each picture. positions: [1 or 3, n].
    target: the correct answer, with boxes relative to whole pictures. windows: the region of each picture that the
    model sees. answer: tokens of its answer in words; empty if it has none. start: index of the first token that an
    activated adapter applies to; None for ordinary adapters.
    """

    ids: torch.Tensor
    features: torch.Tensor | OnDisk | None
    vision: tuple[VisionInput, ...]
    grids: tuple[Grid, ...]
    positions: torch.Tensor
    target: Target
    windows: tuple[Window, ...]
    answer: tuple[int, ...]
    start: int | None = None

    @property
    def embeddings(self) -> torch.Tensor | None:
        """Its features [image tokens, hidden * (1 + levels)], read on each access."""
        return self.features.rows() if isinstance(self.features, OnDisk) else self.features

    @property
    def learned(self) -> Target:
        """The target as the model sees it: boxes relative to the visible window."""
        return into_windows(boxes, self.windows) if (boxes := _boxes(self.target)) else self.target

    def of_whole_pictures(self, answer: object) -> object:
        """A head's answer with boxes relative to whole pictures, as in targets."""
        return out_of_windows(boxes, self.windows) if (boxes := _boxes(answer)) else answer


def forward_samples(
    hf_model: HFModel, samples: Sequence[EncodedSample], features: Sequence[torch.Tensor]
) -> ForwardOutputs:
    """Run samples and their features through the model with its active adapter.

    Samples of similar length share a forward: a batch is padded to its longest sample, so a clip would make pictures in
    the same batch as long as itself.
    """
    groups = group_by_length([len(sample.ids) + len(sample.answer) for sample in samples])
    parts = [_forward(hf_model, [samples[row] for row in rows], [features[row] for row in rows]) for rows in groups]
    if len(parts) == 1:
        return parts[0]
    places = {row: place for place, row in enumerate(row for rows in groups for row in rows)}
    return ForwardOutputs.concatenated(parts).select([places[row] for row in range(len(samples))])


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows of similar length; a single group keeps the order of its rows."""
    shortest, longest = min(lengths), max(lengths)
    if longest <= _MAX_LENGTH_RATIO * shortest:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[row] <= _MAX_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _forward(hf_model: HFModel, samples: Sequence[EncodedSample], features: Sequence[torch.Tensor]) -> ForwardOutputs:
    device = hf_model.device
    rows, positions, wanted, last = [], [], [], []
    for sample, seen in zip(samples, features, strict=True):
        ids = torch.cat([sample.ids, torch.tensor(sample.answer[:-1], dtype=torch.long)])
        rows.append(embed(hf_model, ids, seen, sample.start))
        tail = sample.positions[:, -1:] + torch.arange(
            1, len(ids) - len(sample.ids) + 1
        )  # as `Positions` of the engine
        positions.append(torch.cat([sample.positions, tail], 1).t())
        last.append(len(sample.ids) - 1)
        wanted.append(torch.tensor([_IGNORE] * (len(sample.ids) - 1) + list(sample.answer or (_IGNORE,))))
    # Padding is at the end, after every position that is read, so causal attention excludes it without a mask.
    places = nn.utils.rnn.pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device)
    hidden = hf_model.text_model(
        **batch_arguments(rows), position_ids=places if hf_model.family.mrope else places[0], use_cache=False
    ).last_hidden_state
    targets = nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=_IGNORE).to(device)
    answered = targets != _IGNORE
    logits = hf_model.lm_head(hidden[answered]).float()
    losses, hits = torch.zeros(targets.shape, device=device), torch.zeros_like(answered)
    losses[answered] = F.cross_entropy(logits, targets[answered], reduction="none")
    hits[answered] = logits.argmax(-1) == targets[answered]
    counts = answered.sum(1)
    return ForwardOutputs(
        last=hidden[torch.arange(len(samples)), torch.tensor(last)],
        images=[
            hidden[row, (one.ids == hf_model.image_token_id).nonzero().flatten()] for row, one in enumerate(samples)
        ],
        inputs=inputs_of_images(hf_model, features),
        grids=[one.grids for one in samples],
        words=losses.sum(1) / counts.clamp(min=1),
        # Every token is correct given the ones before it, so greedy decoding gives this answer.
        exact=(hits.sum(1) == counts) & (counts > 0),
    )


def inputs_of_images(hf_model: HFModel, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The language model's inputs at each sample's image tokens [tokens, hidden], without deepstack levels."""
    return [seen[:, : hf_model.hidden_size].to(hf_model.device) for seen in features]


def without_language_model(
    hf_model: HFModel, samples: Sequence[EncodedSample], features: Sequence[torch.Tensor]
) -> ForwardOutputs:
    """The outputs that heads over the inputs of images read; hidden states are left out."""
    inputs = inputs_of_images(hf_model, features)
    nothing = inputs[0].new_zeros(len(samples))
    return ForwardOutputs(
        last=inputs[0].new_zeros(len(samples), hf_model.hidden_size),
        images=[own[:0] for own in inputs],
        inputs=inputs,
        grids=[one.grids for one in samples],
        words=nothing,
        exact=nothing.bool(),
    )


def _boxes(value: object) -> tuple[Box, ...]:
    return tuple(each for each in value if isinstance(each, Box)) if isinstance(value, tuple) else ()
