"""Grouped products: the addresses passed to their kernels, their selection, their build, and plans without one.

The products are emulated on the CPU with the same addresses; the CUTLASS kernels run on a GPU only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import Lane, SegmentPlan, add_delta, cutlass, dispatch
from atmm.batch_stats import BatchStats
from atmm.cutlass import build, lanes
from atmm.cutlass.lanes import legal
from atmm.cutlass.tiling import SPACE
from atmm.strategies.registry import Batched, known, served
from atmm.tuning import search, tables
from atmm.tuning.buckets import Bucket
from tests.atmm.cases import (
    KINDS,
    ROUNDINGS,
    Batch,
    batches,
    check_against_reference,
    check_batch,
    check_group_against_reference,
    make_group,
    make_input,
    needs_compiler,
    segments,
    stats_of,
)
from tests.atmm.emulated import Emulated
from tests.example_counts import scaled

NAME = SPACE[0].name


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """The emulated library, used for CPU tensors too."""
    found = Emulated()
    use(found, monkeypatch)
    return found


def use(found: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "library", lambda: found)
    monkeypatch.setattr(lanes, "serves", lambda stats, name: legal(stats))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    # Hidden values are rounded once, y once per round.
    monkeypatch.setitem(ROUNDINGS, torch.bfloat16, 2)


RANKS = {"a": 8, "b": 24, "c": 64}
BATCHES = {**KINDS, "long": (300, [Lane("a", 0, 300)])}
ROUNDS = {"mixed mode": 2, "one adapter twice": 3, "one adapter there and back": 2, "three at once": 3}
"""Expands of a batch, if more than one: each adds to a token once."""


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", [SPACE[0].name, SPACE[-1].name])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch(kind: str, name: str, dtype: torch.dtype, library: Emulated) -> None:
    """One plan serves every layer, with one shrink for all sites of a group."""
    num_tokens, kinds = BATCHES[kind]
    plan = SegmentPlan(num_tokens, kinds, name)
    for layer in range(2):
        group = make_group(RANKS, missing=[("b", 1)], dtype=dtype, seed=layer)
        group.pack("abc")
        library.calls.clear()
        assert check_against_reference(group, plan, *make_input(num_tokens, group, dtype)) > 1 or not kinds
        assert library.calls.count("shrink") == bool(kinds)
        library.calls.clear()
        check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype))
        assert library.calls == (["point", "shrink", *["expand"] * ROUNDS.get(kind, 1)] if kinds else [])
    assert len(plan.prepared) == bool(kinds)


@needs_compiler
@pytest.mark.slow
@settings(max_examples=scaled(60))
@given(batches(40, multiple=8), st.sampled_from((torch.bfloat16, torch.float16)), st.booleans())
def test_any_batch_agrees_with_the_reference(batch: Batch, dtype: torch.dtype, whole: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        use(Emulated(), patched)
        check_batch(batch, NAME, dtype, whole=whole)


@pytest.mark.parametrize("change", ({"d_in": 44}, {"d_outs": (40, 12, 16)}, {"dtype": torch.float32}, {"rank": 12}))
def test_rows_without_128_bit_alignment_use_another_strategy(change: dict, library: Emulated) -> None:
    rank = change.pop("rank", 8)
    group = make_group({"a": rank, "b": 8}, **{"dtype": torch.bfloat16, **change})
    group.pack("ab")
    plan = SegmentPlan(20, segments({"a": 12, "b": 8}), NAME)
    dtype = change.get("dtype", torch.bfloat16)
    assert check_against_reference(group, plan, *make_input(20, group, dtype)) > 1
    assert not library.calls
    assert all(isinstance(strategy, Batched) for strategy in plan.prepared.values())


@needs_compiler
def test_an_odd_rank_without_a_lane_is_harmless_and_a_failed_launch_raises_an_error(library: Emulated) -> None:
    group = make_group({"a": 5, "b": 8, "c": 16}, dtype=torch.bfloat16)
    group.pack("abc")
    plan = SegmentPlan(20, segments({"b": 12, "c": 8}), NAME)
    assert check_against_reference(group, plan, *make_input(20, group, torch.bfloat16)) > 1
    assert "expand" in library.calls
    kernels = library.tiles[torch.bfloat16, NAME]
    library.tiles[torch.bfloat16, NAME] = kernels._replace(expand=lambda *_: 1)
    x, outputs = make_input(4, group, torch.bfloat16)
    with pytest.raises(RuntimeError, match="could not be launched"):
        add_delta(outputs[0], x, group.sites[0], SegmentPlan(4, [Lane("b", 0, 4)], NAME))


def test_without_a_gpu_grouped_table_entries_use_another_strategy() -> None:
    group = make_group({"a": 8, "b": 16}, dtype=torch.bfloat16)
    group.pack("ab")
    plan = SegmentPlan(20, segments({"a": 12, "b": 8}), NAME)
    assert check_against_reference(group, plan, *make_input(20, group, torch.bfloat16)) > 1
    assert all(isinstance(strategy, Batched) for strategy in plan.prepared.values())


# -- selection --------------------------------------------------------------------------------------------------------


def on_gpu(ranks: dict[str, int], num_tokens: int, lengths: dict[str, int]) -> BatchStats:
    options = {"d_in": 64, "d_outs": (64, 32), "dtype": torch.bfloat16}
    return stats_of(ranks, segments(lengths), num_tokens=num_tokens, on_gpu=True, **options)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A separate, empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cutlass.library.cache_clear()
    yield tmp_path
    cutlass.library.cache_clear()


def test_tiles_are_searched_where_built_and_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "library", Emulated)
    names = {tile.name for tile in SPACE}
    long = {"a": 256, "b": 256}
    assert names <= set(search.candidates(on_gpu({"a": 8, "b": 64}, 512, long), False))
    assert not names & set(search.candidates(on_gpu({"a": 8, "b": 60}, 512, long), False))
    assert not names & set(search.candidates(on_gpu({"a": 8, "b": 64}, 64, {"a": 32, "b": 32}), False))
    many = {str(key): 8 for key in range(32)}
    short = set(search.candidates(on_gpu(many, 512, dict.fromkeys(many, 16)), False)) & names
    assert short and all(" m16 " in name or " m32 " in name for name in short) and short < names


def test_without_a_build_no_tile_is_searched_and_one_warning_is_logged(
    not_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        found = search.candidates(on_gpu({"a": 8, "b": 64}, 512, {"a": 256, "b": 256}), False)
        assert not any(name.startswith("grouped") for name in found)
    assert caplog.text.count("disabled: not built") == 1


def test_a_table_row_falls_back_to_tiled_where_grouped_cannot_run(
    monkeypatch: pytest.MonkeyPatch, not_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = on_gpu({"a": 8, "b": 64}, 512, {"a": 256, "b": 256})
    odd = on_gpu({"a": 8, "b": 60}, 512, {"a": 256, "b": 256})
    rows = {Bucket.of(case).key(): NAME for case in (stats, odd)}
    monkeypatch.setattr(dispatch, "table_for", lambda _: rows)
    assert dispatch.choose(stats) == dispatch.choose(odd) == "tiled"
    assert caplog.text.count("disabled: not built") == 1
    monkeypatch.setattr(lanes, "library", Emulated)
    assert dispatch.choose(stats) == NAME and dispatch.choose(odd) == "tiled"
    assert served("grouped m8 n8 k8 s9", stats) == "tiled"  # from a table older than the tile space


def test_names_are_known_and_differ() -> None:
    assert all(known(tile.name) for tile in SPACE) and not known("grouped")
    assert len({tile.name for tile in SPACE}) == len({tile.symbol for tile in SPACE}) == len(SPACE) <= 12


def test_a_table_with_grouped_rows_is_readable_without_a_build(tmp_path: Path, not_built: Path) -> None:
    row = [512, 2, 64, 64, 128, 2, "EVEN", "bfloat16", NAME]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"device": "a GPU", "columns": tables.COLUMNS, "rows": [row]}))
    assert [strategy for _, strategy in tables.read_table(table, "cuda").rows] == [NAME]


@pytest.mark.parametrize("content", (b"", b"no library"))
def test_an_unloadable_library_is_reported(content: bytes, not_built: Path, caplog: pytest.LogCaptureFixture) -> None:
    build.library_path().parent.mkdir()
    build.library_path().write_bytes(content)
    assert cutlass.library() is None
    assert "grouped products are disabled" in caplog.text


# -- the build --------------------------------------------------------------------------------------------------------

SAID = """\
ptxas info    : Compiling entry function 'shrink' for 'sm_80'
ptxas info    : Function properties for shrink
    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 496 bytes cmem[0]
ptxas info    : Compiling entry function 'expand' for 'sm_90'
ptxas info    : Function properties for expand
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
"""


@pytest.mark.parametrize(("stores", "loads", "spilled"), ((0, 0, 0), (28, 40, 68)))
def test_the_ptxas_report_is_parsed(stores: int, loads: int, spilled: int) -> None:
    assert build.resources(SAID.format(stores=stores, loads=loads)) == (128, spilled)


def write_headers(package: Path) -> Path:
    """Create the include folder of CUTLASS's package."""
    include = package / "source" / "include"
    (include / "cutlass").mkdir(parents=True)
    (include / "cutlass" / "cutlass.h").touch()
    (package / "__init__.py").touch()
    return include


def test_nvcc_is_found_in_every_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("home/bin", "path", "nvidia/cu13/bin")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(folders["path"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    write_headers(tmp_path / "cutlass_library")
    for folder in folders.values():
        assert build.find_toolchain().nvcc == folder / "nvcc"
        (folder / "nvcc").unlink()
    with pytest.raises(FileNotFoundError, match="no nvcc in CUDA_HOME, on the PATH"):
        build.find_toolchain()


def test_headers_are_found_without_importing_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "cutlass_library"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a dependency is missing')")
    (tmp_path / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"headers are not installed; pip install 'vlora\[cutlass\]'"):
        build.find_toolchain()
    include = write_headers(package)
    assert build.find_toolchain().headers == include


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = build.library_path()
    assert first.parent == tmp_path / "vlora"
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    assert build.library_path() != first


def test_one_tile_compiles_without_spilling(tmp_path: Path) -> None:
    try:
        tools = build.find_toolchain()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    tile, library = SPACE[0], tmp_path / "library.so"
    (made,) = build.compile_tiles(tools, (80,), tmp_path, [tile])
    assert made.fault is None and 0 < made.registers < 255
    build.link(tools, [build.compile_problems(tools, (80,), tmp_path), made.object], library)
    operands = tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * 2
    assert operands <= build.shared_bytes(tile, library) <= 166_912
    assert {name for _, name in cutlass.CutlassLibrary(library).tiles} <= {tile.name}  # empty without a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", [tile.name for tile in SPACE])
def test_built_kernels_agree_with_the_reference(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cutlass.library()
    if found is None or (dtype, name) not in found.tiles:
        pytest.skip("not built")
    monkeypatch.setitem(ROUNDINGS, torch.bfloat16, 2)
    for num_tokens, kinds in (*BATCHES.values(), (900, segments({"a": 300, "b": 1, "c": 599}))):
        group = make_group(RANKS, d_in=456, missing=[("b", 1)], dtype=dtype, device="cuda")
        group.pack("abc")
        plan = SegmentPlan(num_tokens, kinds, name)
        check_against_reference(group, plan, *make_input(num_tokens, group, dtype, "cuda"))
        check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype, "cuda"))
        assert all(isinstance(strategy, lanes.Grouped) for strategy in plan.prepared.values())
