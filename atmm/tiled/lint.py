"""Compile kernels for a GPU that need not be there, and look at what came out: does it fit, spill, load in wide
words."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from atmm.tiled import kernels
from atmm.tiled.tiling import Tiling, block_r, space

_SHARED_BYTES = {80: 166_912, 90: 232_448}
"""Shared memory one block may use, by compute capability (NVIDIA's CUDA programming guide, technical
specifications)."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel with its compile-time sizes. aligned: arguments known to be multiples of 16, as they are in use."""

    name: str
    sizes: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


class Facts(NamedTuple):
    """What the compiler made. faults: what rules the kernel out, in words."""

    shared_bytes: int
    registers: int
    stack_bytes: int
    wide_loads: int
    faults: tuple[str, ...]


_NUMBERS = {
    "shrink": ("d_in", "x_stride", "a_stride", "plane_stride", "hidden_stride"),
    "expand": ("column", "y_stride", "plane_stride", "hidden_stride"),
    "single": ("column", "d_in", "y_stride", "x_stride", "a_stride"),
    "merge": (
        "rank", "d_out", "d_in", "out_stride", "out_row", "base_stride", "base_row", "a_stride", "a_row", "bt_stride",
        "bt_row",
    ),
}  # fmt: skip
_POINTERS = {
    "x_ptr": "*bf16", "a_ptr": "*bf16", "bt_ptr": "*bf16", "pool_ptr": "*bf16",
    "y_ptr": "*bf16", "out_ptr": "*bf16", "base_ptr": "*bf16",
    "hidden_ptr": "*fp32", "tile_ptr": "*i32",
}  # fmt: skip


def inspect(kernel: Kernel, capability: int) -> Facts:
    """Compile for compute capability 80 or 90, in bfloat16, and list what is wrong with it."""
    function = getattr(kernels, kernel.name)
    names = function.arg_names
    types = {**_POINTERS, **dict.fromkeys(_NUMBERS[kernel.name], "i32"), "scale": "fp32"}
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in kernel.sizes else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in kernel.sizes.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name not in kernel.sizes and name not in ("scale", "rank", "tile_ptr")
        },
    )
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(made.asm["cubin"])
    wide = len(re.findall(r"(?:LDG|LDGSTS)\.E[^ ]*\.128", _disassembled(made.asm["cubin"])))
    faults = []
    if made.metadata.shared > _SHARED_BYTES[capability]:
        faults.append(f"{made.metadata.shared} bytes of shared memory, {_SHARED_BYTES[capability]} are there")
    if stack:
        faults.append(f"{stack} bytes spilled")
    if not wide:
        faults.append("no 128-bit load of the factors")
    return Facts(made.metadata.shared, registers, stack, wide, tuple(faults))


_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, bytes of stack."""
    told = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "--dump-resource-usage", cubin))
    assert told is not None, "cuobjdump tells no resource usage"
    return int(told[1]), int(told[2])


def _disassembled(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / tool, option, file.name], check=True, capture_output=True, text=True).stdout


def kernels_of(tiling: Tiling, rank: int) -> list[Kernel]:
    """What a tiling launches for adapters of up to this rank, with two lanes at a token."""
    rows = block_r(rank)
    common = {"BLOCK_M": tiling.block_m, "BLOCK_R": rows, "PRECISION": "ieee"}
    shrinks = {"BLOCK_K": tiling.block_k, "EVEN_K": True}
    expands = {"BLOCK_N": tiling.block_n, "MAX_RANK": -(-rank // rows) * rows, "PARTS": 2, "EVEN_N": True, "LINE": 8}
    warps, stages = tiling.num_warps, tiling.num_stages
    if not tiling.split_k:
        return [Kernel("single", {**common, **shrinks, **expands}, warps, stages)]
    return [
        Kernel("shrink", {**common, **shrinks}, warps, stages),
        Kernel("expand", {**common, **expands, "PLANES": tiling.split_k}, warps),
    ]


def merging(rank: int) -> Kernel:
    rows = block_r(rank)
    sizes = {"BLOCK_N": 64, "BLOCK_K": 128, "BLOCK_R": rows, "MAX_RANK": rows, "EVEN": True, "PRECISION": "ieee"}
    return Kernel("merge", sizes)


def whole_space() -> list[Kernel]:
    """Every kernel that the search may time in bfloat16, each once: adapters of rank 16, 32 and 64."""
    found: dict[str, Kernel] = {}
    for rank in (16, 32, 64):
        for kernel in (merging(rank), *(kernel for tiling in space(2) for kernel in kernels_of(tiling, rank))):
            found.setdefault(repr(kernel), kernel)
    return list(found.values())


def sample() -> list[Kernel]:
    """What is launched for decoding, for prefill and to merge where nobody has measured, and a single launch."""
    some = (Tiling(16, 128, 128, 8, 3), 16), (Tiling(64, 128, 128, 1, 3), 64), (Tiling(16, 128, 128, 0, 3), 16)
    return [*(kernel for tiling, rank in some for kernel in kernels_of(tiling, rank)), merging(16), merging(64)]
