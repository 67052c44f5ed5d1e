"""The last decoder layer, limited to the rows that are read; keys and values are computed for all rows.

No later layer reads the last layer's hidden states. Of a prompt only the last token's state is read (a task head over
image tokens reads those instead), so most rows of a prefill need no query, attention, output projection or MLP there.

`q_proj`, `o_proj` and `mlp` map each row independently in every model family. Their classes are swapped for ones that
compute the rows that are read and return zeros for the others, so that the model's code sees the expected shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import atmm
from vlora.errors import UnsupportedModel
from vlora.lora.adapted_linear import AdaptedLinear, LaneScope


def lanes_of_rows(lanes: Sequence[atmm.Lane], rows: np.ndarray) -> list[atmm.Lane]:
    """The lanes of a packed batch over a subset of its rows, renumbered from 0 to len(rows) - 1. rows: ascending."""
    ends = np.searchsorted(rows, [(lane.start, lane.stop) for lane in lanes]).tolist()
    return [lane._replace(start=a, stop=b) for lane, (a, b) in zip(lanes, ends, strict=True) if a < b]


def plan_of_rows(lanes: Sequence[atmm.Lane], rows: np.ndarray) -> atmm.SegmentPlan | None:
    own = lanes_of_rows(lanes, rows)
    return atmm.SegmentPlan(len(rows), own) if own else None


class LastLayer:
    """A decoder layer with row-wise modules that can be limited to a subset of the batch's rows."""

    def __init__(self, layer: nn.Module, scope: LaneScope) -> None:
        """Swap the classes of the layer's modules, in place. Call it after sharding the model.

        Raises:
            UnsupportedModel: The layer does not have the required modules.
        """
        attention: Any = getattr(layer, "self_attn", None)
        projections: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        mlp: Any = getattr(layer, "mlp", None)
        if not all(isinstance(linear, AdaptedLinear) for linear in projections) or not isinstance(mlp, nn.Module):
            raise UnsupportedModel(
                f"{type(layer).__name__} has no self_attn with q_proj, k_proj, v_proj and o_proj, or no mlp; "
                "this version of transformers is not supported"
            )
        query, *keys_and_values, output = projections
        self._scope = scope
        self._inputs: list[AdaptedLinear] = [query, *keys_and_values]
        self.active: tuple[torch.Tensor, atmm.SegmentPlan | None] | None = None
        for module, width in ((query, query.out_features), (output, output.out_features), (mlp, output.out_features)):
            _limit(module, self, width)

    @contextmanager
    def limited_to(self, index: torch.Tensor | None, plan: atmm.SegmentPlan | None = None) -> Iterator[None]:
        """Context in which only the rows `index`, int64 [K], are computed (None: all). plan: the lanes over them."""
        if index is None:
            yield
            return
        self.active = index, plan
        # q is computed for fewer rows than k and v here, so the three cannot share one product.
        siblings = [linear.siblings for linear in self._inputs]
        for linear in self._inputs:
            linear.siblings = None
        try:
            yield
        finally:
            self.active = None
            for linear, before in zip(self._inputs, siblings, strict=True):
                linear.siblings = before

    def compute(self, forward: Callable[[torch.Tensor], torch.Tensor], width: int, x: torch.Tensor) -> torch.Tensor:
        """Apply a row-wise function to x [..., T, d]. Returns [..., T, width], with zeros in rows that are not read."""
        if self.active is None:
            return forward(x)
        index, plan = self.active
        y = x.new_zeros(*x.shape[:-1], width)
        if len(index):
            with self._scope.replaced(plan):
                y.index_copy_(-2, index, forward(x.index_select(-2, index)))
        return y


class _Limited(nn.Module):
    """A mixin for the class of a row-wise module."""

    limit: LastLayer
    width: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.limit.compute(super().forward, self.width, x)


def _limit(module: nn.Module, limit: LastLayer, width: int) -> None:
    kind = type(module)
    module.__class__ = type(f"Limited{kind.__name__}", (_Limited, kind), {})
    limited: Any = module
    limited.limit, limited.width = limit, width
