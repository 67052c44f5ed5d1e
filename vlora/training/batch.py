"""Samples of several adapters as one packed batch, without padding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

import atmm
from vlora.errors import BadRequest
from vlora.models.hf_model import HFModel, VisionFeatures

IGNORED = -100
"""The label of a token without a loss, as in transformers."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sequence to learn.

    Attributes:
        ids: Tokens, int64 [n].
        labels: The tokens with a loss, and `IGNORED` elsewhere, int64 [n]. Token i is predicted from those before it.
        positions: Rotary positions, int64 [1 or 3, n]. None: text, counted from 0.
        visual: Features of all its images and videos, in the order of their placeholders.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    visual: VisionFeatures | None = None

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.labels.shape != self.ids.shape:
            raise BadRequest(
                f"a sample has {tuple(self.ids.shape)} tokens and {tuple(self.labels.shape)} labels; "
                "give one dimension of equal length"
            )
        if not (self.labels[1:] != IGNORED).any():
            raise BadRequest(
                f"a sample of {len(self.ids)} tokens has no label after its first token; there is nothing to learn"
            )


class PackedBatch:
    """The tokens of all samples one after the other. Samples of one adapter are neighbours.

    Attributes:
        adapters: In the order of their tokens.
        spans: First and last token (exclusive) of each sample.
        num_tokens: T.
        predicting: Tokens with a label on the next one, int64 [n], ascending.
        targets: Those labels [n].
        parts: The range of `predicting` that belongs to each adapter.
    """

    def __init__(self, hf_model: HFModel, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Raises BadRequest for a sample that does not fit the model."""
        counts = {adapter: sum(len(one.ids) for one in own) for adapter, own in samples.items()}
        # The compiled kernels pass over all tokens between the first and the last short lane.
        self.adapters = tuple(sorted(samples, key=counts.__getitem__))
        ordered = [one for adapter in self.adapters for one in samples[adapter]]
        for one in ordered:
            check_sample(hf_model, one)
        self.spans: list[tuple[int, int]] = []
        lanes: list[atmm.Lane] = []
        predicting: list[torch.Tensor] = []
        self.parts: dict[str, slice] = {}
        start = num_targets = 0
        for adapter in self.adapters:
            first, first_target = start, num_targets
            for one in samples[adapter]:
                self.spans.append((start, start + len(one.ids)))
                predicting.append(start + (one.labels[1:] != IGNORED).nonzero().flatten())
                start += len(one.ids)
                num_targets += len(predicting[-1])
            lanes.append(atmm.Lane(adapter, first, start))
            self.parts[adapter] = slice(first_target, num_targets)
        self.num_tokens = start
        self.plan = atmm.SegmentPlan(start, lanes)
        device = hf_model.device
        self.predicting = torch.cat(predicting).to(device)
        self.targets = torch.cat([one.labels[1:][one.labels[1:] != IGNORED] for one in ordered]).to(device)
        self._ids = torch.cat([one.ids for one in ordered]).to(device)
        rows = 3 if hf_model.family.mrope else 1
        self._positions = torch.cat([_positions(one, rows) for one in ordered], 1).to(device)
        places = list(hf_model.placeholders.values())
        self._visual = torch.isin(self._ids, torch.tensor(places, device=device)).nonzero().flatten()
        self._features = [one.visual for one in ordered if one.visual is not None]

    def embed(self, hf_model: HFModel) -> torch.Tensor:
        """The language model's inputs [T, hidden], with the features of images in their places."""
        embeddings: torch.Tensor = hf_model.embed(self._ids)
        if self._features:
            embeddings[self._visual] = torch.cat([each.rows for each in self._features]).to(embeddings)
        return embeddings

    def rotations(self, hf_model: HFModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions, as the decoder layers read them."""
        positions = self._positions[:, None] if hf_model.family.mrope else self._positions
        cos, sin = hf_model.text_model.rotary_emb(hf_model.embed.weight[:1], positions)
        return cos, sin

    def add_deepstack(self, hidden: torch.Tensor, level: int) -> torch.Tensor:
        """Hidden states [T, hidden] after layer `level`, with the features that Qwen3-VL adds there."""
        if not self._features or level >= len(self._features[0].deepstack):
            return hidden
        features = torch.cat([each.deepstack[level] for each in self._features])
        return hidden.index_add(0, self._visual, features.to(hidden))

    @functools.cached_property
    def masks(self) -> dict[int, torch.Tensor]:
        """By length of a sample, the tokens that no token may see: bool [n, n]."""
        device = self._ids.device
        lengths = {stop - start for start, stop in self.spans}
        return {n: torch.ones(n, n, dtype=torch.bool, device=device).triu(1) for n in lengths}


def _positions(sample: Sample, rows: int) -> torch.Tensor:
    return torch.arange(len(sample.ids)).expand(rows, -1) if sample.positions is None else sample.positions


def check_sample(hf_model: HFModel, sample: Sample) -> None:
    """Raises BadRequest for a sample that does not fit the model."""
    num_tokens, rows = len(sample.ids), 3 if hf_model.family.mrope else 1
    if num_tokens > hf_model.max_positions:
        raise BadRequest(
            f"a sample has {num_tokens} tokens; the model takes at most {hf_model.max_positions}, so shorten it"
        )
    if sample.positions is not None and sample.positions.shape != (rows, num_tokens):
        raise BadRequest(
            f"a sample of {num_tokens} tokens has positions of shape {tuple(sample.positions.shape)}; "
            f"this model needs ({rows}, {num_tokens})"
        )
    vocabulary = hf_model.embed.num_embeddings
    if not 0 <= int(sample.ids.min()) <= int(sample.ids.max()) < vocabulary:
        raise BadRequest(f"a sample has a token outside the model's vocabulary of {vocabulary}")
    wanted = int(torch.isin(sample.ids, torch.tensor(list(hf_model.placeholders.values()))).sum())
    given = 0 if sample.visual is None else len(sample.visual.rows)
    if wanted != given:
        raise BadRequest(
            f"a sample has {wanted} image and video tokens and features of {given}; encode its images first"
        )
