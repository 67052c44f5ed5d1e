"""Workarounds for Triton's interpreter.

It multiplies the bits of bfloat16 as integers: operands become floats here. It loses the carry when it rounds to
eight-bit floats (127 becomes 64): torch rounds them here.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["check_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _bfloat16_products() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def floats(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            bits = handle.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain(self, floats(a), floats(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture(autouse=True, scope="session")
def _eight_bit_rounding() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float  # noqa: SLF001  (triton)

    def convert(given: Any, given_dtype: Any, dtype: Any, rounding: Any) -> Any:
        if (given_dtype, dtype) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(given).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return plain(given, given_dtype, dtype, rounding)

    interpreter._convert_float = convert  # noqa: SLF001
