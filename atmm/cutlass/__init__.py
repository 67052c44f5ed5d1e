"""Grouped products for prefill: CUTLASS kernels built ahead by `vlora tune --build-cutlass`, called through ctypes.

`plan` says what is multiplied, `problems.h` and `problems.cu` where it lies, `tile.cu` multiplies; `tiling` holds the
tiles, `build` compiles them, `lanes` is the strategy. Not yet run on a GPU: no figures.

Where nothing was built, or not for the GPU at hand, that is said once; then no search times these tiles, and the Triton
kernels serve where a table names them. The library is kept beside the compiled CPU kernels, under a name that tells
sources, flags and tiles: it is missed after one of them has changed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from atmm.cutlass.build import TYPES, place
from atmm.cutlass.tiling import SPACE, Tile

ARGUMENT_BYTES = 128  # per problem: what both products are called with, as `problems.h` lays it
_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_POINT = (_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER)
_SHRINK = (_POINTER, _INT, _INT, _POINTER)
_EXPAND = (_POINTER, _INT, _INT, _INT, _INT, _FLOAT, _POINTER)

_log = logging.getLogger(__name__)


class Launches(NamedTuple):
    """One tile's two products in one type; `tile.cu` tells what they take, and that they return 0 or have failed."""

    tile: Tile
    shrink: Callable[..., int]
    expand: Callable[..., int]


class Library:
    """`point` of `problems.cu`; by type and name, the tiles that were built and that the GPU at hand can run."""

    def __init__(self, file: Path) -> None:
        loaded = ctypes.CDLL(str(file))
        self.point = _function(loaded, "atmm_grouped_point", _POINT)
        self.launches: dict[tuple[torch.dtype, str], Launches] = {}
        for name in TYPES:
            for tile in SPACE:
                blocks = getattr(loaded, f"atmm_grouped_blocks_{name}_{tile.symbol}", None)
                if blocks is not None and blocks() > 0:
                    self.launches[getattr(torch, name), tile.name] = Launches(
                        tile,
                        _function(loaded, f"atmm_grouped_shrink_{name}_{tile.symbol}", _SHRINK),
                        _function(loaded, f"atmm_grouped_expand_{name}_{tile.symbol}", _EXPAND),
                    )


def _function(loaded: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> Callable[..., int]:
    function = getattr(loaded, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


@functools.cache
def library() -> Library | None:
    """What was built for the GPU at hand; None where nothing was, which is logged once."""
    try:
        file = place()
        if not file.exists():
            _log.warning("no grouped products: they are not built here (`vlora tune --build-cutlass` builds them)")
            return None
        found = Library(file)
    except (OSError, AttributeError) as error:
        _log.warning("no grouped products: %s", error)
        return None
    if not found.launches:
        _log.warning("no grouped products: %s holds none that this GPU can run; build it again here", file)
        return None
    return found
