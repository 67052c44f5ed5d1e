"""The block-diagonal factors nearest to given factors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vlora.parallel.adapter_sharding import Blocks


class BlockApproximation(NamedTuple):
    """Factors in PEFT's block-diagonal format, and the error of their delta: its Frobenius norm relative to that of the
    original delta."""

    a: Tensor
    b: Tensor
    error: float


def nearest_blocks(a: Tensor, b: Tensor, blocks: Blocks, rank: int) -> BlockApproximation:
    """The factors with N blocks and total rank `rank` with the delta nearest to b a.

    With a block-diagonal B (side b), block i of the outputs is B_i A_i: B_i [d_out / N, rank / N] is its block, and
    A_i [rank / N, d_in] are rows of A that no other block uses. With a block-diagonal A (side a), block i of the inputs
    gives B_i A_i, with A_i its block and B_i columns of B that no other block uses. In both cases the delta consists of
    N blocks D_i that share no parameters, and B_i A_i can be any matrix of rank up to rank / N. The squared Frobenius
    error is the sum over blocks of |D_i - B_i A_i|^2, so each term is minimised separately by truncated SVD (Eckart and
    Young): the error is the sum of the squares of D_i's singular values beyond the first rank / N. The split of
    B_i A_i into two factors is arbitrary; here it is balanced.

    D_i has rank r at most, so its SVD is that of an r x r matrix between two orthonormal bases, in float64. At
    rank = N r the error is 0.

    Args:
        a: [r, d_in].
        b: [d_out, r].
        rank: divisible by N, like the sharded dimension.
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
        empty = each - kept  # unused rank beyond the block's own
        all_a.append(pad(half[:, None] * (right[:kept] @ basis_a.t()), (0, 0, 0, empty)))
        all_b.append(pad(basis_b @ left[:, :kept] * half, (0, empty)))
        lost += float(values[kept:].square().sum())
        whole += float(values.square().sum())
    error = (lost / whole) ** 0.5 if whole else 0.0
    return BlockApproximation(torch.cat(all_a), torch.cat(all_b, 1 if on_a else 0), error)
