"""Workaround for Triton's interpreter, which multiplies the bits of bfloat16 as integers: operands become floats."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

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
