"""Compilation of the grouped products with nvcc: required tools, ptxas resource reports, and the library's file."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from atmm import cache
from atmm.cutlass.tiling import SPACE, Tile

TYPES = ("bfloat16", "float16")
_HERE = Path(__file__).parent
_SOURCES = ("problems.h", "problems.cu", "tile.cu")
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
_TIMEOUT_S = 1800


class Toolchain(NamedTuple):
    """The required tools. nvcc: the compiler. headers: CUTLASS's include folder."""

    nvcc: Path
    headers: Path


class BuiltTile(NamedTuple):
    """One tile's compiled products. registers: maximum per thread over its kernels. fault: the reason to reject it."""

    tile: Tile
    object: Path
    registers: int
    spilled_bytes: int
    fault: str | None


def find_toolchain() -> Toolchain:
    """The installed tools. Raises FileNotFoundError if one is missing."""
    return Toolchain(_nvcc(), _headers())


def _nvcc() -> Path:
    """nvcc of CUDA_HOME, else on the PATH, else of the package nvidia-cuda-nvcc."""
    home = os.environ.get("CUDA_HOME")
    found = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations or ()) if packages else ():
        found += sorted(Path(folder).glob("*/bin/nvcc"))
    for file in found:
        if os.access(file, os.X_OK):
            return file
    raise FileNotFoundError(
        "there is no nvcc in CUDA_HOME, on the PATH or in the package nvidia-cuda-nvcc; install the CUDA toolkit, "
        "version 12 or later"
    )


def _headers() -> Path:
    """CUTLASS's include folder, found without importing the package, because its dependencies may be missing."""
    package = importlib.util.find_spec("cutlass_library")
    folder = Path(package.origin).parent / "source" / "include" if package and package.origin else None
    if folder is None or not (folder / "cutlass" / "cutlass.h").is_file():
        raise FileNotFoundError("CUTLASS's headers are not installed; pip install 'vlora[cutlass]'")
    return folder


def library_path() -> Path:
    """The library's file, which may not exist. Its name is a digest of sources, flags and tiles."""
    digest = hashlib.sha256(repr((FLAGS, SPACE)).encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    return cache.folder() / f"atmm-grouped-{digest.hexdigest()[:16]}.so"


def compile_problems(tools: Toolchain, capabilities: Sequence[int], folder: Path) -> Path:
    """The object of `problems.cu`. Raises subprocess.SubprocessError, and OSError if nvcc cannot be run."""
    made = folder / "problems.o"
    _run(tools.nvcc, *FLAGS, *_targets(capabilities), "-c", _HERE / "problems.cu", "-o", made)
    return made


def compile_tiles(
    tools: Toolchain, capabilities: Sequence[int], folder: Path, tiles: Sequence[Tile] = SPACE
) -> Iterator[BuiltTile]:
    """Compile the tiles in parallel, one per core of this process, and yield each when it is done."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(_compile, tile, tools, capabilities, folder) for tile in tiles]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(tile: Tile, tools: Toolchain, capabilities: Sequence[int], folder: Path) -> BuiltTile:
    made = folder / f"{tile.symbol}.o"
    sizes = (
        f"-DTILE={tile.symbol}", f"-DTM={tile.block_m}", f"-DTN={tile.block_n}", f"-DTK={tile.block_k}",
        f"-DWM={tile.warp_m}", f"-DWN={tile.warp_n}", f"-DSTAGES={tile.num_stages}",
    )  # fmt: skip
    options: list[str | Path] = [*FLAGS, *_targets(capabilities), *sizes, "-I", tools.headers]
    try:
        report = _run(tools.nvcc, *options, "-c", _HERE / "tile.cu", "-o", made)
    except subprocess.CalledProcessError as problem:
        errors = [line for line in problem.stderr.splitlines() if "error" in line]
        return BuiltTile(tile, made, 0, 0, f"does not compile: {(errors or [reason(problem)])[0]}")
    registers, spilled = resources(report)
    return BuiltTile(tile, made, registers, spilled, f"{spilled} bytes spilled" if spilled else None)


def resources(report: str) -> tuple[int, int]:
    """The maximum registers per thread and the total spilled bytes, from the `ptxas -v` output of several kernels."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    return max(registers, default=0), sum(spilled)


def link(tools: Toolchain, objects: Sequence[Path], library: Path) -> None:
    """Link the library and move it into place atomically. Raises as `compile_problems`."""
    fresh = objects[0].with_name(library.name)
    # The CUDA packages install the runtime in lib, which their nvcc does not search.
    _run(tools.nvcc, "-shared", *objects, f"-L{tools.nvcc.resolve().parents[1] / 'lib'}", "-o", fresh)
    os.replace(fresh, library)


def shared_bytes(tile: Tile, library: Path) -> int:
    """Shared memory of one block of a tile in the library: the maximum over both products and types."""
    loaded = ctypes.CDLL(str(library))
    return max(getattr(loaded, f"atmm_grouped_shared_{name}_{tile.symbol}")() for name in TYPES)


def reason(problem: Exception) -> str:
    """The end of a failed compiler's output, or the exception's message."""
    if isinstance(problem, subprocess.CalledProcessError):
        return f"{problem.cmd[0]} failed: {problem.stderr.strip()[-500:]}"
    return str(problem)


def _targets(capabilities: Sequence[int]) -> list[str]:
    return [part for number in capabilities for part in ("-gencode", f"arch=compute_{number},code=sm_{number}")]


def _run(*command: str | Path) -> str:
    """Run the command and return its stderr, which contains the ptxas report."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stderr
