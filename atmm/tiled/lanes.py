"""The strategy that runs on a GPU through the Triton kernels, and merging through them."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.shares import GroupShares
from atmm.sites import Packed, Site
from atmm.survey import Survey
from atmm.tiled import kernels
from atmm.tiled.plan import cut

# float32 products stay float32: tensor cores' shorter formats would change answers.
_PRECISION = "ieee"


class Tiled(GroupShares):
    """Share of a site: hidden values of all lanes of the group, float32 [planes, rows, width]."""

    adds_transposed = False

    __slots__ = ("_block_k", "_block_m", "_block_r", "_hidden", "_max_rank", "_parts", "_shrink_tiles", "_tiles")

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        layout = survey.layout
        longest = max((lane.stop - lane.start for lane in survey.lanes), default=1)
        self._block_m = 16 if longest <= 16 else 32 if longest <= 32 else 64
        highest = max((span.rank for site in layout.spans for span in site.values()), default=1)
        self._block_r = 16 if highest <= 16 else 32 if highest <= 32 else 64
        self._max_rank = -(-highest // self._block_r) * self._block_r
        self._block_k = 64 if layout.dtype.itemsize == 4 else 128
        tiles = cut(survey, self._block_m)
        self._parts = tiles.parts
        # One table, one copy: the sites' tiles behind those of the shrink.
        flat = [value for tile in tiles.shrink for value in tile]
        places = {}
        for site, own in tiles.expand.items():
            places[site] = (len(flat), len(own))
            flat += [value for tile in own for value in tile]
        table = torch.tensor(flat, dtype=torch.int32).to(layout.device, non_blocking=True)
        self._shrink_tiles = table, len(tiles.shrink)
        self._tiles = {site: (table[first:], count) for site, (first, count) in places.items()}
        planes = _planes(len(tiles.shrink) * self._max_rank // self._block_r, layout.d_in, self._block_k)
        self._hidden = torch.empty(planes, tiles.num_rows, self._max_rank, dtype=torch.float32, device=layout.device)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        hidden = self._share(x, site.index, packed)
        if hidden is None:
            return
        if self._part is not None:
            y = y[self._part]
        bt, d_out = packed.bts[site.index], y.shape[1]
        table, count = self._tiles[site.index]
        block_n = 128
        kernels.expand[(count, -(-d_out // block_n))](
            y, hidden, bt, table, d_out, y.stride(0), hidden.stride(0), hidden.stride(1), bt.stride(0),
            BLOCK_M=self._block_m, BLOCK_N=block_n, BLOCK_R=self._block_r, MAX_RANK=self._max_rank,
            PARTS=self._parts, PLANES=hidden.shape[0], EVEN_N=d_out % block_n == 0, PRECISION=_PRECISION,
        )  # fmt: skip

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        if x.stride(1) != 1:
            x = x.contiguous()
        table, count = self._shrink_tiles
        hidden, a, d_in = self._hidden, packed.a, x.shape[1]
        planes = hidden.shape[0]
        kernels.shrink[(count, self._max_rank // self._block_r, planes)](
            x, a, hidden, table, d_in, x.stride(0), a.stride(0), hidden.stride(0), hidden.stride(1),
            BLOCK_M=self._block_m, BLOCK_R=self._block_r, BLOCK_K=self._block_k, SPLIT_K=planes,
            EVEN_K=d_in % (self._block_k * planes) == 0, PRECISION=_PRECISION,
        )  # fmt: skip
        return dict.fromkeys(self._tiles, hidden)


_PROGRAMS = 128  # about one per multiprocessor of a large GPU


def _planes(programs: int, d_in: int, block_k: int) -> int:
    """Shares of d_in worked on side by side: enough programs to fill a GPU, each with two blocks at least."""
    planes = 1
    while programs * planes < _PROGRAMS and planes < 8 and d_in >= 4 * planes * block_k:
        planes *= 2
    return planes


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float) -> None:
    """As `atmm.merge`, for tensors whose last dimension is contiguous; one launch for all layers."""
    n, d_out, d_in = base.shape
    rank = a.shape[1]
    block_r = 16 if rank <= 16 else 32 if rank <= 32 else 64
    block_n, block_k = 64, 128
    kernels.merge[(n, -(-d_out // block_n), -(-d_in // block_k))](
        out, base, a, bt, scale, rank, d_out, d_in,
        out.stride(0), out.stride(1), base.stride(0), base.stride(1),
        a.stride(0), a.stride(1), bt.stride(0), bt.stride(1),
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_R=block_r, MAX_RANK=-(-rank // block_r) * block_r,
        EVEN=d_out % block_n == 0 and d_in % block_k == 0, PRECISION=_PRECISION,
    )  # fmt: skip
