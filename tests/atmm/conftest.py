"""Workarounds for Triton's interpreter.

It multiplies the bits of bfloat16 as integers: operands become floats here. It loses the carry when it rounds to
eight-bit floats (127 becomes 64): torch rounds them here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.atmm.cases import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["interpreted/check_*.py"]


@pytest.fixture(autouse=INTERPRETED, scope="session")
def _exact_interpreter() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot
    convert = interpreter._convert_float  # noqa: SLF001  (triton)

    def floats(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            bits = handle.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
        return handle

    def dot_of_floats(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return create_dot(self, floats(a), floats(b), d, *rest)

    def rounded_by_torch(given: Any, given_dtype: Any, dtype: Any, rounding: Any) -> Any:
        if (given_dtype, dtype) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(given).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(given, given_dtype, dtype, rounding)

    interpreter.InterpreterBuilder.create_dot = dot_of_floats
    interpreter._convert_float = rounded_by_torch  # noqa: SLF001
