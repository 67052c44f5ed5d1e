"""Compiled kernels launched through their handles, on a driver that only records the launches.

`test_triton.py` runs this file in a separate process, because Triton has one driver per process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import atmm.operator
import atmm.strategies.registry
import atmm.warmup
from atmm import FactorTable, Lane, SegmentPlan, add_deltas, compile_ahead, compile_merges, compile_quantized_merges
from atmm.formats import Fp8
from atmm.layers import SiteGroup
from atmm.places import PackedPlaces
from atmm.quantized import QuantizedWeight, quantized_empty
from atmm.segments import BatchStats
from atmm.triton import kernels
from atmm.triton.handles import handle
from atmm.triton.lanes import prepare
from atmm.triton.merging import merge, merge_rows
from atmm.triton.tiling import Tiling, all_usual
from tests.atmm.cases import make_group, segments
from vlora.memory.arena import empty
from vlora.models.attention import LayerTensors
from vlora.models.gpu.attention import GpuAttention

launched: list[tuple] = []


class _Utilities:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 2, 64, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536}


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        # grid, then stream, function, metadata and hooks, then the kernel's arguments
        launched.append((self.name, arguments[:3], arguments[9:]))


class _Driver:
    utils = _Utilities()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def _clean() -> None:
    driver.set_active(_Driver())
    handle.cache_clear()
    launched.clear()


def count_launches(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels launched by Triton's own launch after this call."""
    names: list[str] = []
    run = JITFunction.run

    def counting(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        names.append(self.__name__)
        return run(self, *arguments, **options)

    patch.setattr(JITFunction, "run", counting)
    return names


@pytest.fixture
def triton_launches(_clean: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return count_launches(monkeypatch)


def serve(group: SiteGroup, y: torch.Tensor, x: torch.Tensor, tiling: str) -> None:
    """The call of one step for a whole group, as on a GPU."""
    assert group.packed is not None
    plan = SegmentPlan(len(x), segments({"a": 3, "b": 5}))
    layout = group.packed.layout
    strategy = prepare(plan, BatchStats(plan, layout), PackedPlaces(layout), Tiling.named(tiling))
    strategy.add_all(y, x, group)


def make(d_in: int = 256, num_tokens: int = 8) -> tuple[SiteGroup, torch.Tensor, torch.Tensor]:
    group = make_group({"a": 8, "b": 16}, d_in=d_in, d_outs=(128, 64), dtype=torch.bfloat16)
    group.pack("ab")
    return group, torch.zeros(num_tokens, 192, dtype=torch.bfloat16), torch.ones(num_tokens, d_in, dtype=torch.bfloat16)


def test_another_alignment_uses_another_kernel(triton_launches: list[str]) -> None:
    group, y, _ = make()
    flat = torch.ones(8 * 256 + 8, dtype=torch.bfloat16)
    for offset in (0, 1, 0, 1, 8):
        serve(group, y, flat[offset : offset + 8 * 256].view(8, 256), "tiled m16 n64 k64 s1 p2")
    assert triton_launches.count("shrink") == 2 and triton_launches.count("expand") == 1


def test_kernels_declare_their_sizes_in_the_order_the_handles_give_them(triton_launches: list[str]) -> None:
    group, y, x = make()
    for tiling in ("tiled m16 n64 k64 s2 p2", "tiled m16 n64 k64 s0 p2") * 2:
        serve(group, y, x, tiling)
    assert sorted(triton_launches) == ["expand", "shrink", "single"], "later launches reuse the handle of the first"
    by_name: dict[str, list[tuple]] = {}
    for name, _, arguments in launched:
        by_name.setdefault(name, []).append(arguments)
    for name, (own, through_handle) in by_name.items():
        sizes = [value for value in own if not torch.is_tensor(value)]
        assert sizes == [value for value in through_handle if not torch.is_tensor(value)], name
        assert len(own) == len(getattr(kernels, name).arg_names)


class _Model:
    """A model with 14 query heads and 2 KV heads of 64, for `GpuAttention.compile_ahead`."""

    head_dim, num_kv_heads, kv_dim, dtype = 64, 2, 128, torch.bfloat16

    class text_model:
        class _Layer:
            class self_attn:
                q_proj = torch.nn.Linear(8, 14 * 64)

        layers = (_Layer,)


def test_decode_kernels_compiled_ahead_are_not_compiled_in_a_step(triton_launches: list[str]) -> None:
    # block_rows is no multiple of 16 if blocks are whole pages.
    gpu = GpuAttention(torch.device("cpu"), block_size=16, block_rows=904, decodes=True, prefills=False)
    gpu.compile_ahead(_Model, max_batch=40)
    assert triton_launches == 4 * ["decode_part", "decode_join"]  # of up to 8, 16, 32 and 64 requests
    launched.clear()
    triton_launches.clear()
    matrix = torch.zeros(4096, 128, dtype=torch.bfloat16)
    for batch, length in ((1, 1), (3, 900), (9, 17), (20, 3000), (40, 256)):
        contexts = [np.arange(length) // 16 * 904 + np.arange(length) % 16 for _ in range(batch)]
        tokens = gpu.lay_out_decodes(range(batch), contexts, torch.from_numpy)
        for layer in range(2):
            q = torch.zeros(14, batch, 64, dtype=torch.bfloat16).transpose(0, 1)
            cache = matrix[32 * layer :], matrix[32 * layer + 16 :]
            out = torch.zeros(batch, 14, 64, dtype=torch.bfloat16)
            tokens.attend(LayerTensors(out, q, cache, cache, 0.125))
    assert triton_launches == [] and len(launched) == 5 * 2 * 2
    for name, _, arguments in launched:
        assert len(arguments) == len(getattr(kernels, name).arg_names)
    sizes = list(launched[0][2][-8:])
    assert sizes == [7, 64, 2, 64, 8, 16, 16, "ieee"]


@settings(max_examples=60)
@given(data=st.data())
def test_kernels_compiled_ahead_are_not_compiled_in_a_step(data: st.DataObject, ahead: list[str]) -> None:
    ranks = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=16))
    adapters = {f"adapter {index}": rank for index, rank in enumerate(ranks)}
    group = make_group(adapters, d_in=256, d_outs=(128, 64), dtype=torch.bfloat16)
    if data.draw(st.booleans()):
        group.pack(adapters)
    else:
        table = FactorTable([group.sites], torch.bfloat16, torch.device("cpu"))
        for key in adapters:
            table.put(key)
    tokens = data.draw(st.lists(st.integers(0, 16), min_size=len(ranks), max_size=len(ranks)))
    num_tokens = max(1, sum(tokens))
    lanes = segments(dict(zip(adapters, tokens, strict=True)))
    if num_tokens <= 16 and data.draw(st.booleans()):
        lanes.append(Lane("adapter 0", 0, num_tokens, -1.0))
    x = torch.zeros(num_tokens, 256, dtype=torch.bfloat16)
    add_deltas(x.new_zeros(num_tokens, 192), x, group, SegmentPlan(num_tokens, lanes))
    assert not ahead


@pytest.fixture(scope="module")
def ahead() -> Iterator[list[str]]:
    """The names of kernels launched by Triton's own launch after ahead-of-time compilation."""
    driver.set_active(_Driver())
    handle.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atmm.operator, "choose", lambda stats: "tiled")
        patch.setattr(atmm.strategies.registry, "triton_interprets", lambda: True)
        group = make_group({}, d_in=256, d_outs=(128, 64), dtype=torch.bfloat16)
        # Compile and draw only a third of the space: the whole space takes a minute.
        named = [tiling for tiling in all_usual(2) if tiling.block_m == 16]
        with pytest.MonkeyPatch.context() as smaller:
            smaller.setattr(atmm.warmup, "HIGHEST_RANK", 16)
            smaller.setattr(atmm.warmup, "tilings_to_compile", lambda *sites: named)
            compile_ahead([group], torch.bfloat16, torch.device("cpu"))
        yield count_launches(patch)


MERGED = ((192, 256), (64, 256), (80, 144))  # the last has parts of blocks


@settings(max_examples=100)
@given(
    rank=st.integers(1, 64),
    shape=st.sampled_from(MERGED),
    num_layers=st.integers(1, 3),
    place=st.integers(0, 3),
    scale=st.sampled_from([1.0, -1.0]),
    in_place=st.booleans(),
)
def test_merges_compiled_ahead_are_not_compiled_in_a_switch(
    rank: int,
    shape: tuple[int, int],
    num_layers: int,
    place: int,
    scale: float,
    in_place: bool,
    merged_ahead: list[str],
) -> None:
    d_out, d_in = shape
    slab, shadow = (torch.zeros(6, d_out, d_in, dtype=torch.bfloat16) for _ in range(2))
    # Factors in an adapter's run: each tensor starts at a multiple of 256 bytes.
    steps = [-(-rank * d * 2 // 256) * 128 for d in (d_in, d_out)]
    a, bt = (
        torch.zeros(num_layers * step, dtype=torch.bfloat16).as_strided((num_layers, rank, d), (step, d, 1))
        for step, d in zip(steps, (d_in, d_out), strict=True)
    )
    entries = slice(place, place + num_layers)
    merge((slab if in_place else shadow)[entries], slab[entries], a, bt, scale)
    values = torch.zeros(6, d_out, d_in, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(6, d_out, 1)
    merge_rows(values[entries], scales[entries], values[entries], scales[entries], a, bt, 448.0)
    assert not merged_ahead


@pytest.fixture(scope="module")
def merged_ahead() -> Iterator[list[str]]:
    """The names of kernels launched by Triton's own launch after merges were compiled ahead."""
    driver.set_active(_Driver())
    handle.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        names = count_launches(patch)
        compile_merges(MERGED, torch.bfloat16, torch.device("cpu"))
        # Whole and partial blocks, each for ranks up to 16, 32 and 64, multiples of 16 and others, and rank 1.
        assert len(names) == 2 * (3 * 2 + 1)
        patch.setattr(QuantizedWeight, "device", torch.device("cuda"))  # as the merge asks for it
        compile_quantized_merges(
            MERGED, quantized_empty(Fp8(), torch.device("cpu"), empty), torch.bfloat16, torch.device("cpu")
        )
        assert len(names) == 2 * 2 * (3 * 2 + 1)
        names.clear()
        yield names
