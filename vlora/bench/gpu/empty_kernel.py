"""A Triton kernel with the least work, to measure the cost of a launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_zero(out_ptr):
    tl.store(out_ptr, 0.0)


def launch(out: Tensor) -> None:
    """Launch one program, which writes one value."""
    _store_zero[(1,)](out)
