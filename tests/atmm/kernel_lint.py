"""Compile kernels without a GPU and check the result: shared memory, register spills, and the width of loads.

    python -m tests.atmm.kernel_lint

compiles the whole space that `vlora tune --device cuda` searches, in about ten minutes, and prints the faulty kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from atmm.formats import Int8
from atmm.layers import ROW_ALIGNMENT
from atmm.quantized import Integers
from atmm.triton.attention import GROUP_ROWS, JOIN_PARTS, JOIN_WARPS, padded_batch, tile_of
from atmm.triton.handles import KERNELS
from atmm.triton.pointwise import ROTATED
from atmm.triton.products import product_tile
from atmm.triton.tiling import SHARED_BYTES, Tiling, all_usual, block_r, merge_blocks, space

CAPABILITIES = {10 * major + minor: most for (major, minor), most in SHARED_BYTES.items()}
"""Shared memory of a block by compute capability: A100, RTX 30, Jetson Orin, RTX 40 and L4, H100 and H200, B200, RTX
50."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel with its compile-time sizes, for values of 2 bytes (bfloat16) or 4 (float32).

    capability: the lowest compute capability that has the kernel's instructions. weights: the type of quantized ones.
    """

    name: str
    sizes: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    itemsize: int = 2
    capability: int = 80
    weights: str = "fp8e4nv"


class Facts(NamedTuple):
    """Facts of a compiled kernel. faults: the reasons to reject it, as text."""

    shared_bytes: int
    registers: int
    stack_bytes: int
    wide_loads: int
    faults: tuple[str, ...]


_NUMBERS = {
    "shrink": ("d_in", "x_stride", "plane_stride", "hidden_stride", "slot_stride", "hidden_rows"),
    "expand": ("column", "y_stride", "plane_stride", "hidden_stride", "slot_stride", "hidden_rows"),
    "single": ("column", "d_in", "y_stride", "x_stride", "slot_stride"),
    "merge": (
        "rank", "d_out", "d_in", "out_stride", "out_row", "base_stride", "base_row", "a_stride", "a_row", "bt_stride",
        "bt_row",
    ),
    "merge_rows": (
        "rank", "d_out", "d_in", "values_stride", "values_row", "scale_stride", "base_stride", "base_row",
        "base_scale_stride", "a_stride", "a_row", "bt_stride", "bt_row",
    ),
    "decode_part": ("out_stride", "q_stride", "q_head_stride", "block_rows", "row_stride", "table_stride"),
    "decode_join": ("out_stride",),
    "normalize": ("width", "x_stride", "head_stride"),
    "gate_product": ("width", "gate_stride", "up_stride"),
    "rotate": ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "angle_stride"),
    "write_kv": ("width", "row_stride", "k_stride", "v_stride"),
    "quantize_rows": ("width", "x_stride"),
    "multiply_integers": ("num_tokens", "d_out", "d_in", "y_stride", "x_stride", "values_stride", "scale_stride"),
    "join_products": ("num_tokens", "d_out", "y_stride"),
    "merge_groups": (
        "rank", "d_out", "d_in", "values_stride", "values_row", "scale_stride", "scale_row", "base_stride", "base_row",
        "base_scale_stride", "base_scale_row", "a_stride", "a_row", "bt_stride", "bt_row",
    ),
}  # fmt: skip
_VALUES = (
    "x_ptr", "a_ptr", "bt_ptr", "origin_ptr", "y_ptr", "out_ptr", "base_ptr", "q_ptr", "k_ptr", "v_ptr", "kv_ptr",
    "k_cache_ptr", "v_cache_ptr", "cos_ptr", "sin_ptr", "weight_ptr", "gate_ptr", "up_ptr",
    "bias_ptr",
)  # fmt: skip
_COUNTS = ("rank", "num_tokens", "batch", "shares")  # of any divisibility
_FLOATS = ("scale", "epsilon", "largest")
_TABLES = ("tile_ptr", "place_ptr", "length_ptr", "table_ptr", "rows_ptr")
_POINTERS = {
    **dict.fromkeys(("hidden_ptr", "part_ptr", "stat_ptr", "scale_ptr", "base_scale_ptr"), "*fp32"),
    **dict.fromkeys(_TABLES, "*i32"),
    **dict.fromkeys(("places_ptr", "rows_ptr"), "*i64"),
}
_MOST_REGISTERS = {"decode_part": 168}  # three programs of four warps per multiprocessor


def inspect(kernel: Kernel, capability: int) -> Facts:
    """Compile for one of `CAPABILITIES`, and list the faults."""
    function = KERNELS[kernel.name]
    names = function.arg_names
    values = dict.fromkeys(_VALUES, "*fp32" if kernel.itemsize == 4 else "*bf16")
    integers = dict.fromkeys((*_NUMBERS[kernel.name], *_COUNTS), "i32")
    types = {**_POINTERS, **values, **integers, **dict.fromkeys(_FLOATS, "fp32"), "values_ptr": f"*{kernel.weights}"}
    if kernel.name in ("merge_rows", "merge_groups"):
        types["base_ptr"] = types["values_ptr"]
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in kernel.sizes else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in kernel.sizes.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name not in kernel.sizes and name not in (*_FLOATS, *_COUNTS, *_TABLES)
        },
    )
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(made.asm["cubin"])
    loads = _loads(_disassembled(made.asm["cubin"]))
    faults = []
    if made.metadata.shared > CAPABILITIES[capability]:
        faults.append(f"{made.metadata.shared} bytes of shared memory, {CAPABILITIES[capability]} available")
    # Two registers of float32 attention, which no default uses, on 12.0 only.
    if stack > (8 if (capability, kernel.name, kernel.itemsize) == (120, "decode_part", 4) else 0):
        faults.append(f"{stack} bytes spilled")
    if registers > _MOST_REGISTERS.get(kernel.name, registers):
        faults.append(f"{registers} registers, {_MOST_REGISTERS[kernel.name]} allowed")
    faults += _narrow(kernel, loads)
    return Facts(made.metadata.shared, registers, stack, loads[128], tuple(faults))


def _loads(assembly: str) -> Counter[int]:
    """Number of loads from global memory by width in bits."""
    found = re.findall(r"\b(?:LDG|LDGSTS)\.E([.\w]*)", assembly)
    sizes = (re.search(r"\.(?:[US]?(8|16|64|128))(?=\.|$)", modifiers) for modifiers in found)
    return Counter(32 if size is None else int(size[1]) for size in sizes)


def _narrow(kernel: Kernel, loads: Counter[int]) -> list[str]:
    """Faults for factors, inputs, outputs, keys and values that are not loaded in words of 128 bits.

    Narrower loads are allowed for the entries of tables, lengths and the statistics of shared contexts, the angles of
    rotations and, in an expand with few hidden values per thread, for the hidden values.
    """
    sizes, threads = kernel.sizes, 32 * kernel.num_warps
    parts, lengths = sizes.get("PARTS", 1), sizes.get("BATCH", 0)
    entries = {
        "shrink": 5,
        "expand": 3 + 4 * parts,
        "single": 4 + 3 * parts,
        # Triton 3.6 loads block tables of 16-bit values for keys and for values, in two parts each.
        "decode_part": 2 + -(-lengths // 128) + kernel.num_stages * (4 if kernel.itemsize == 2 else 1),
        "decode_join": 4 + -(-lengths // 32) + parts,
        "merge_rows": 4,
        "rotate": 8,
    }
    if kernel.name in ("multiply_integers", "merge_groups"):
        return []  # weights have their words where the layout of the product's operand allows it, and scales are narrow
    starts = {"shrink": 2, "expand": 1 + 2 * parts, "single": 1 + 4 * parts, "rotate": 8, "write_kv": 1}
    allowed, needed = Counter({32: entries.get(kernel.name, 0), 64: starts.get(kernel.name, 0)}), 1
    if kernel.name == "rotate":
        needed, allowed[16] = 2, 8  # of queries or keys, and of angles
    elif kernel.name == "expand":
        blocks = parts * -(-sizes["MAX_RANK"] // sizes["BLOCK_R"])
        needed = (blocks * sizes["BLOCK_R"] + sizes["BLOCK_M"]) * sizes["BLOCK_N"] * kernel.itemsize // (16 * threads)
        bits = 32 * sizes["BLOCK_M"] * sizes["BLOCK_R"] // threads
        if bits < 128:
            allowed[bits] += blocks * sizes["PLANES"]
    elif kernel.name == "decode_part":
        needed = 1 + 2 * sizes["TILE"] * sizes["HEAD"] * kernel.itemsize // (16 * threads)
    elif kernel.name == "decode_join":
        needed = parts * sizes["HEAD"] // (4 * threads)
    faults = [
        f"{count} loads of {bits} bits, {allowed[bits]} allowed"
        for bits, count in sorted(loads.items())
        if bits < 128 and count > allowed[bits]
    ]
    if loads[128] < needed:
        faults.append(f"{loads[128]} loads of 128 bits, {needed} needed")
    return faults


_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and stack bytes."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "--dump-resource-usage", cubin))
    assert usage is not None, "cuobjdump printed no resource usage"
    return int(usage[1]), int(usage[2])


def _disassembled(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / tool, option, file.name], check=True, capture_output=True, text=True).stdout


def kernels_of(tiling: Tiling, rank: int, itemsize: int = 2) -> list[Kernel]:
    """The kernels that a tiling launches for adapters of up to this rank, with two lanes per token."""
    rows = block_r(rank)
    common = {"BLOCK_M": tiling.block_m, "BLOCK_R": rows, "PRECISION": "ieee"}
    common["LINE"] = ROW_ALIGNMENT // itemsize
    shrinks = {"BLOCK_K": tiling.block_k, "EVEN_K": True}
    expands = {"BLOCK_N": tiling.block_n, "MAX_RANK": -(-rank // rows) * rows, "PARTS": 2, "EVEN_N": True}
    warps, stages = tiling.num_warps, tiling.num_stages
    if not tiling.split_k:
        return [Kernel("single", {**common, **shrinks, **expands}, warps, stages, itemsize)]
    return [
        Kernel("shrink", {**common, **shrinks, "SITES": 3}, warps, stages, itemsize),
        Kernel("expand", {**common, **expands, "PLANES": tiling.split_k}, warps, itemsize=itemsize),
    ]


def merging(rank: int, itemsize: int = 2) -> list[Kernel]:
    """The kernels that merge adapters of up to this rank: into weights of the factors' type and, from factors in 16
    bits, into eight bits."""
    rows, (block_n, block_k) = block_r(rank), merge_blocks(itemsize)
    blocks = {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": rows, "MAX_RANK": rows}
    sizes = {**blocks, "EVEN": True, "PRECISION": "ieee"}
    rounded = Kernel("merge_rows", {**sizes, "INTEGERS": False}, capability=89)
    rows_of_eight_bits = [rounded] if itemsize == 2 else []
    return [Kernel("merge", sizes, itemsize=itemsize), *rows_of_eight_bits]


def decoding(group: int, kv_heads: int, head_dim: int, batch: int, itemsize: int = 2) -> list[Kernel]:
    """The kernels of decode attention for blocks of 16 tokens and batches of up to this size."""
    tile = tile_of(itemsize, 16)
    sizes = {"GROUP": group, "HEAD": head_dim, "KV_HEADS": kv_heads, "TILE": tile.tokens, "BATCH": padded_batch(batch)}
    part = {"PAD": GROUP_ROWS, "BLOCK": 16, "PRECISION": "ieee"}
    return [
        Kernel("decode_part", {**sizes, **part}, num_stages=tile.stages, itemsize=itemsize),
        Kernel("decode_join", {**sizes, "PARTS": JOIN_PARTS}, JOIN_WARPS, itemsize=itemsize),
    ]


def pointwise(itemsize: int = 2) -> list[Kernel]:
    """The kernels of norms, gates, rotations and KV writes for the sizes of a 7 B model."""
    rotations = (
        Kernel("rotate", {"HEADS": 28, "KV_HEADS": 4, "ROWS": ROTATED, "HALF": half}, 1, itemsize=itemsize)
        for half in (32, 64)
    )
    blocks = (Kernel(name, {"BLOCK": 1024}, itemsize=itemsize) for name in ("gate_product", "write_kv"))
    norms = (
        Kernel("normalize", {"HEADS": heads, "BLOCK": block}, warps, itemsize=itemsize)
        for heads, block, warps in ((1, 4096, 8), (32, 256, 1))
    )
    return [*norms, *blocks, *rotations]


def rounding(itemsize: int = 2) -> list[Kernel]:
    """The kernel that rounds inputs to eight bits, for sizes of 7 B models."""
    sizes = ((4096, 8), (16384, 16), (32768, 16))
    return [
        Kernel("quantize_rows", {"BLOCK": block}, warps, itemsize=itemsize, capability=89) for block, warps in sizes
    ]


FORMATS = [
    *(Integers(bits, group, 0 if offsets else 2 ** (bits - 1), signed=False, offsets=offsets)
      for bits in (4, 8) for group in (0, 32, 64, 128) for offsets in (False, True)),
    Int8.integers,
]  # fmt: skip


def integers(formats: Iterable[Integers] = FORMATS, tokens: Iterable[int] = (16, 32, 64, 512)) -> list[Kernel]:
    """The kernels of products with integers, and of merges into them."""
    found = [Kernel("join_products", {"BLOCK": 1024, "SPLITS": splits, "BIAS": True}) for splits in (2, 8)]
    for kind in formats:
        weights = {"GROUP": kind.group, "BITS": kind.bits, "OFFSETS": kind.offsets, "PRECISION": "ieee"}
        held = "i8" if kind.signed else "u8"
        for itemsize, num_tokens in ((4, 16), *((2, number) for number in tokens)):
            tile = product_tile(num_tokens, itemsize)
            blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
            more = {"ZERO": kind.zero, "FLIPPED": kind.signed, "SPLITS": 2, "EVEN_K": True, "BIAS": False}
            sizes = {**blocks, **weights, **more}
            found.append(Kernel("multiply_integers", sizes, tile.num_warps, tile.num_stages, itemsize, weights=held))
        for rank in (16, 64):
            rows, (block_n, block_k) = block_r(rank), merge_blocks(2)
            blocks = {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": rows, "MAX_RANK": rows, "EVEN": True}
            if kind.signed:
                whole = {**blocks, "PRECISION": "ieee", "INTEGERS": True}
                found.append(Kernel("merge_rows", whole, weights=held))
            elif kind.group:
                found.append(Kernel("merge_groups", {**blocks, **weights}, weights=held))
    return found


def whole_space() -> list[Kernel]:
    """Every kernel that the search may time or that is launched without measurements, each once.

    For adapters of rank 16, 32 and 64, in bfloat16 and float32. Kernels for float16 differ from bfloat16 only in the
    instructions.
    """
    found: dict[str, Kernel] = {}
    for itemsize, rank in itertools.product((2, 4), (16, 32, 64)):
        tilings = (*space(itemsize), *all_usual(itemsize))
        launched = (kernel for tiling in tilings for kernel in kernels_of(tiling, rank, itemsize))
        for kernel in (*merging(rank, itemsize), *launched):
            found.setdefault(repr(kernel), kernel)
    heads = ((7, 4), (6, 2), (4, 8), (1, 32))  # of Qwen2-VL 7B and 2B, Llama 3 8B and Llama 2 7B
    for itemsize, (group, kv_heads), batch, dim in itertools.product((2, 4), heads, (8, 32, 256), (64, 128)):
        for kernel in decoding(group, kv_heads, dim, batch, itemsize):
            found.setdefault(repr(kernel), kernel)
    return [*found.values(), *pointwise(), *pointwise(4), *rounding(), *rounding(4), *integers()]


def compilations(space: Iterable[Kernel]) -> list[tuple[Kernel, int]]:
    """Each kernel with each compute capability that has its instructions."""
    return [(kernel, capability) for kernel in space for capability in CAPABILITIES if capability >= kernel.capability]


def sample() -> list[Kernel]:
    """The kernels launched without measurements for decode, prefill, merge and attention, and a single launch."""
    some = (
        (Tiling(16, 128, 128, 8, 3), 16, 2), (Tiling(64, 128, 128, 1, 3), 64, 2), (Tiling(16, 128, 128, 0, 3), 16, 2),
        (Tiling(16, 128, 64, 1, 3), 64, 4),
    )  # fmt: skip
    merges = *merging(16), *merging(64), *merging(64, 4)
    decodes = (
        decoding(7, 4, 128, 32), decoding(4, 8, 128, 8), decoding(1, 32, 128, 256), decoding(7, 2, 64, 8),
        decoding(7, 4, 128, 32, 4), decoding(1, 32, 128, 8, 4),
    )  # fmt: skip
    lanes = itertools.chain(*(kernels_of(*own) for own in some))
    weights = integers([Integers(4, 32, 8, signed=False, offsets=False), Int8.integers], tokens=(16, 512))
    return [*lanes, *merges, *itertools.chain(*decodes), *pointwise(), *rounding(), *weights]


if __name__ == "__main__":
    found = [(kernel, capability, inspect(kernel, capability)) for kernel, capability in compilations(whole_space())]
    faulty = [
        f"{kernel} on sm_{capability}: {'; '.join(facts.faults)}" for kernel, capability, facts in found if facts.faults
    ]
    print(*faulty, f"{len(found) - len(faulty)} of {len(found)} kernels are sound", sep="\n")
    sys.exit(bool(faulty))
