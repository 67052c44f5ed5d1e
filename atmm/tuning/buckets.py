"""Rounded shapes and their 128-bit integer keys in a table (V-LoRA section 4.3.2)."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from atmm.batch_stats import BatchStats

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICE_TYPES = ("cpu", "cuda")


class Evenness(enum.IntEnum):
    """SINGLE: one lane. EVEN: equal lanes that form one run at every site. RAGGED: anything else."""

    SINGLE = 0
    EVEN = 1
    RAGGED = 2


class Bucket(NamedTuple):
    """A rounded shape: sizes are rounded up to powers of two, so that similar shapes share one measured choice.

    tokens: size of the range with lanes. adapters: number of distinct adapters. rank: mean rank of the lanes at the
    sites they target. d_out: sum over the group's sites. num_sites: number of sites, not rounded.
    """

    tokens: int
    adapters: int
    rank: int
    d_in: int
    d_out: int
    num_sites: int
    evenness: Evenness
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, stats: BatchStats) -> Bucket:
        layout = stats.layout
        ranks = [run.rank for site in stats.runs for run in site for _ in range(run.num_lanes)]
        if len(stats.lanes) == 1:
            evenness = Evenness.SINGLE
        else:
            evenness = Evenness.EVEN if all(len(runs) <= 1 for runs in stats.runs) else Evenness.RAGGED
        return cls(
            tokens=round_up(stats.num_tokens),
            adapters=round_up(len(stats.keys)),
            rank=round_up(round(sum(ranks) / max(1, len(ranks)))),
            d_in=round_up(layout.d_in),
            d_out=round_up(sum(layout.d_outs)),
            num_sites=len(layout.d_outs),
            evenness=evenness,
            dtype=layout.dtype,
            device_type=layout.device.type,
        )

    def key(self) -> int:
        """The bucket as an integer below 2**128. The fields are concatenated, so different buckets have different keys.

        Raises:
            ValueError: if a field does not fit its bits, or the dtype or device type is unknown.
        """
        if self.dtype not in DTYPES or self.device_type not in DEVICE_TYPES:
            raise ValueError(
                f"no key for {self.dtype} on {self.device_type}; known are {', '.join(map(str, DTYPES))} on "
                f"{', '.join(DEVICE_TYPES)}"
            )
        key = 0
        for name, value, bits in (
            ("tokens", self.tokens, 24),
            ("adapters", self.adapters, 16),
            ("rank", self.rank, 16),
            ("d_in", self.d_in, 20),
            ("d_out", self.d_out, 20),
            ("num_sites", self.num_sites, 8),
            ("evenness", int(self.evenness), 8),
            ("dtype", DTYPES.index(self.dtype), 8),
            ("device_type", DEVICE_TYPES.index(self.device_type), 8),
        ):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} is {value}; a key holds 0 to {(1 << bits) - 1}")
            key = key << bits | value
        return key


def round_up(value: int) -> int:
    """The next power of two, as the sizes in a bucket."""
    return 1 << (value - 1).bit_length() if value > 1 else value
