"""The block-diagonal factors nearest to given ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vlora.parallel.adapter_sharding import Blocks


class Nearest(NamedTuple):
    """Factors as PEFT stores block-diagonal ones, and the error of their delta: its Frobenius norm relative to that of
    the delta they stand for."""

    a: Tensor
    b: Tensor
    error: float


def nearest_blocks(a: Tensor, b: Tensor, blocks: Blocks, rank: int) -> Nearest:
    """Factors in N blocks, of `rank` in all, whose delta is as near to b a as any such factors' can be. a [r, d_in],
    b [d_out, r]; `rank` and the dimension that blocks share must be divisible by N.

    With a block-diagonal B (side b), block i of the outputs gets B_i A_i: B_i [d_out / N, rank / N] is its block, and
    A_i [rank / N, d_in] are rows of A that no other block reads. With a block-diagonal A (side a), block i of the
    inputs gives B_i A_i, with A_i its block and B_i columns of B of its own. Either way the delta's N blocks D_i cover
    it, share no number of any factor, and B_i A_i can be every matrix of rank up to rank / N and no other. The squared
    Frobenius error is the sum over blocks of |D_i - B_i A_i|^2, so each term is made least by itself, which truncated
    SVD does (Eckart and Young): what is lost are the squares of D_i's singular values beyond the first rank / N. How
    B_i A_i is parted into two factors is free, and even here.

    D_i has rank r at most, so its SVD is that of an r x r matrix between two orthonormal bases, in float64. At
    rank = N r nothing is lost.
    """
    each = rank // blocks.num
    on_a = blocks.side == "a"
    a, b = a.double(), b.double()
    pairs = [(part, b) for part in a.chunk(blocks.num, 1)] if on_a else [(a, part) for part in b.chunk(blocks.num)]
    all_a, all_b, lost, whole = [], [], 0.0, 0.0
    for own_a, own_b in pairs:
        basis_b, core_b = torch.linalg.qr(own_b)
        basis_a, core_a = torch.linalg.qr(own_a.t())
        left, values, right = torch.linalg.svd(core_b @ core_a.t(), full_matrices=False)
        kept = min(each, len(values))
        half = values[:kept].sqrt()
        empty = each - kept  # of more rank than the block can have
        all_a.append(pad(half[:, None] * (right[:kept] @ basis_a.t()), (0, 0, 0, empty)))
        all_b.append(pad(basis_b @ left[:, :kept] * half, (0, empty)))
        lost += float(values[kept:].square().sum())
        whole += float(values.square().sum())
    error = (lost / whole) ** 0.5 if whole else 0.0
    return Nearest(torch.cat(all_a), torch.cat(all_b, 1 if on_a else 0), error)
