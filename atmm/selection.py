"""Which strategy for which shape: the table that a search filled, and a rule where the table is silent.

A choice is made once per plan and class of sites, never per layer. The table is a dict from a 128-bit integer (V-LoRA section
4.3.2) to a strategy's name. The key packs the rounded shape, one field beside the other::

    bits 112-127   96-111    80-95   56-79   32-55   16-31      8-15    0-7
         tokens    adapters  rank    d_in    d_out   evenness   dtype   device type

The rule estimates each strategy's time as calls + bytes of factors + arithmetic. Its constants are orders of magnitude
(measured on an x86 server core with AMX: a 16-bit product costs some 20 us whatever its size, a 32-bit one 3 us).
"""

from __future__ import annotations

import enum
import functools
import json
import logging
import pathlib
from typing import NamedTuple

import torch

from atmm.device import device_name
from atmm.strategies import STRATEGIES
from atmm.survey import Survey

logger = logging.getLogger(__name__)

TABLES = pathlib.Path(__file__).parent / "tables"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICE_TYPES = ("cpu", "cuda")


class Evenness(enum.IntEnum):
    """SINGLE: one lane. EVEN: one run of equal lanes at every site. RAGGED: anything else."""

    SINGLE = 0
    EVEN = 1
    RAGGED = 2


class Bucket(NamedTuple):
    """A rounded shape: sizes are powers of two, rounded up, so that near shapes share one measured choice.

    tokens: of the range that has lanes. adapters: different ones. rank: their mean at the sites they target. d_out: the
    group's sites together.
    """

    tokens: int
    adapters: int
    rank: int
    d_in: int
    d_out: int
    evenness: Evenness
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, survey: Survey) -> Bucket:
        layout = survey.layout
        ranks = [run.rank for site in survey.runs for run in site for _ in range(run.num_lanes)]
        if len(survey.lanes) == 1:
            evenness = Evenness.SINGLE
        else:
            evenness = Evenness.EVEN if all(len(runs) <= 1 for runs in survey.runs) else Evenness.RAGGED
        return cls(
            _round_up(survey.num_tokens),
            _round_up(survey.num_adapters),
            _round_up(sum(ranks) // max(1, len(ranks))),
            _round_up(layout.d_in),
            _round_up(sum(layout.d_outs)),
            evenness,
            layout.dtype,
            layout.device.type,
        )

    def key(self) -> int:
        """The bucket as one integer below 2**128; different buckets have different keys.

        Raises ValueError when a field does not fit its bits or the dtype or device type is unknown.
        """
        fields = (
            (self.tokens, 16),
            (self.adapters, 16),
            (self.rank, 16),
            (self.d_in, 24),
            (self.d_out, 24),
            (int(self.evenness), 16),
            (_place(self.dtype, DTYPES), 8),
            (_place(self.device_type, DEVICE_TYPES), 8),
        )
        key = 0
        for value, bits in fields:
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{self} does not fit a key: {value} needs more than {bits} bits")
            key = key << bits | value
        return key


def _place(value: object, known: tuple) -> int:
    if value not in known:
        raise ValueError(f"{value} is not one of {', '.join(map(str, known))}")
    return known.index(value)
