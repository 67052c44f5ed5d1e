"""Grouped products for prefill: CUTLASS kernels built ahead by `vlora tune --build-cutlass`, called through ctypes.

`plan` builds the problems, `problems.h` and `problems.cu` fill in the addresses, `tile.cu` multiplies; `tiling` lists
the tiles, `build` compiles them, `lanes` is the strategy. Not yet run on a GPU: no figures.

Without a build for this GPU, a warning is logged once, the search skips these tiles, and the Triton kernels serve
table entries that name them. The library is stored beside the compiled CPU kernels. Its name is a digest of sources,
flags and tiles, so a change of any of them requires a new build.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from atmm.cutlass.build import TYPES, library_path
from atmm.cutlass.tiling import SPACE, Tile

ARGUMENT_BYTES = 128  # per problem: the arguments of both products, in the layout of `problems.h`
_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_POINT = (_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER)
_SHRINK = (_POINTER, _INT, _INT, _POINTER)
_EXPAND = (_POINTER, _INT, _INT, _INT, _INT, _FLOAT, _POINTER)

_log = logging.getLogger(__name__)


class TileKernels(NamedTuple):
    """One tile's two products in one type. `tile.cu` documents their arguments; they return 0 on success."""

    tile: Tile
    shrink: Callable[..., int]
    expand: Callable[..., int]


class CutlassLibrary:
    """`point` of `problems.cu`, and by type and name the tiles that are built and supported by this GPU."""

    def __init__(self, file: Path) -> None:
        loaded = ctypes.CDLL(str(file))
        self.point = _function(loaded, "atmm_grouped_point", _POINT)
        self.tiles: dict[tuple[torch.dtype, str], TileKernels] = {}
        for name in TYPES:
            for tile in SPACE:
                blocks = getattr(loaded, f"atmm_grouped_blocks_{name}_{tile.symbol}", None)
                if blocks is not None and blocks() > 0:
                    self.tiles[getattr(torch, name), tile.name] = TileKernels(
                        tile,
                        _function(loaded, f"atmm_grouped_shrink_{name}_{tile.symbol}", _SHRINK),
                        _function(loaded, f"atmm_grouped_expand_{name}_{tile.symbol}", _EXPAND),
                    )


def _function(loaded: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> Callable[..., int]:
    function = getattr(loaded, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


@functools.cache
def library() -> CutlassLibrary | None:
    """The library built for this GPU; None without one, which is logged once."""
    try:
        file = library_path()
        if not file.exists():
            _log.warning("grouped products are disabled: not built; run `vlora tune --build-cutlass` to build them")
            return None
        found = CutlassLibrary(file)
    except (OSError, AttributeError) as error:
        _log.warning("grouped products are disabled: %s", error)
        return None
    if not found.tiles:
        _log.warning(
            "grouped products are disabled: %s has no kernels for this GPU; run `vlora tune --build-cutlass` again",
            file,
        )
        return None
    return found
