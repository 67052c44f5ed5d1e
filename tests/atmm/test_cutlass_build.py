"""Building the grouped products: search for tools, parsing of the ptxas report, and one tile with a real nvcc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atmm import cutlass
from atmm.cutlass import build
from atmm.cutlass.tiling import SPACE

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
