"""The CPU kernels in C++: built once per machine with the installed compiler and called through ctypes.

They are faster where torch's fixed cost per product, or its second pass over the weights, dominates. Every kernel has a
plain torch fallback: without a compiler, if compiling fails, or with ATMM_COMPILED=0 in the environment, `library`
returns None and the results do not change. The compiled file is cached in `$XDG_CACHE_HOME/vlora` (default
`~/.cache/vlora`). Its name is a digest of sources, flags and the compiler's target, so that a change triggers a new
build and machines of different types may share one home directory. If that folder is not writable, each process
compiles its own copy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from atmm import cache

_SOURCES = (
    "merge.cpp",
    "lanes.cpp",
    "products.cpp",
    "attention.cpp",
    "prefill.cpp",
    "norm.cpp",
    "rotate.cpp",
    "int8.cpp",
    "grouped.cpp",
    "evict.cpp",
)
_HEADERS = ("tiles.h", "vectors.h")
_OWN_FLAGS = {"rotate.cpp": ("-ffp-contract=off",)}  # after _FLAGS
# -fno-tree-pre: GCC moves work on sums from behind a loop into it, for which the registers do not suffice.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-tree-pre", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fopenmp", "-fPIC"),
)
_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_MATRICES = (_POINTER, _INT, _INT)  # data, strides of matrix and row
_ATTENTION = (_POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _INT, *(_POINTER,) * 3, *(_INT,) * 4, _FLOAT)
_CACHE = (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT)
_ARGUMENTS = {
    "merge": (*_MATRICES * 4, _FLOAT, _INT, _INT, _INT, _INT),
    "shrink": (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "expand": (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "attend": _ATTENTION,
    "attend_chunk": _ATTENTION,
    "deltas": (_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT),
    "linear": (_POINTER, _INT, _POINTER, _INT, _INT, _INT),
    "int8": (*(_POINTER, _INT) * 3, _POINTER, _POINTER, _INT, _INT, _INT),
    "int4_groups": (*(_POINTER, _INT) * 3, _POINTER, _POINTER, _INT, _FLOAT, _POINTER, _INT, _INT, _INT, _INT),
    "int8_groups": (*(_POINTER, _INT) * 3, _POINTER, _POINTER, _INT, _FLOAT, _POINTER, _INT, _INT, _INT, _INT),
    "normalize": (_POINTER, *(_POINTER, _INT) * 2, _POINTER, _INT, _INT, _FLOAT),
    "gate_product": (_POINTER, *(_POINTER, _INT) * 2, _INT, _INT),
    "gelu": (_POINTER, _POINTER, _INT, _INT),
    "rotate": (*(_POINTER, _INT, _INT, _INT) * 2, _POINTER, _POINTER, _INT, _INT, _INT, *_CACHE),
}
_TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

_log = logging.getLogger(__name__)


class Library:
    """The kernels by element type; the C++ sources document them and their arguments."""

    def __init__(self, file: Path) -> None:
        loaded = ctypes.CDLL(str(file))
        kernels = {
            name: {dtype: _function(loaded, f"atmm_{name}_{suffix}", arguments) for dtype, suffix in _TYPES.items()}
            for name, arguments in _ARGUMENTS.items()
        }
        self.merge, self.shrink, self.expand, self.attend = map(kernels.pop, ("merge", "shrink", "expand", "attend"))
        self.attend_chunk = kernels.pop("attend_chunk")
        self.deltas, self.linear = map(kernels.pop, ("deltas", "linear"))
        self.normalize, self.rotate, self.gate_product = map(kernels.pop, ("normalize", "rotate", "gate_product"))
        self.gelu = kernels.pop("gelu")
        self.int8, self.int4_groups, self.int8_groups = map(kernels.pop, ("int8", "int4_groups", "int8_groups"))
        self.has_int8, self.has_tiles = bool(loaded.atmm_has_int8()), bool(loaded.atmm_has_tiles())
        self.evict: Callable[[int | None, int], int] = loaded.atmm_evict
        self.evict.argtypes, self.evict.restype = (_POINTER, _INT), ctypes.c_int32  # type: ignore[attr-defined]


def _function(loaded: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> Callable[..., None]:
    function = getattr(loaded, name)
    function.argtypes, function.restype = arguments, None
    return function


class Tape(TorchDispatchMode):
    """The kernel calls of this thread in its context, to be repeated without the Python code around them.

    Tensors made there are kept. complete: whether torch only allocated and viewed tensors beside these calls.
    """

    complete = True
    _recording = threading.Lock()  # the kernels are those of the process: two threads must not replace them at once

    def __enter__(self) -> Tape:
        self._recording.acquire()
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._kept: list[Any] = []
        self._thread, self._kernels = threading.get_ident(), vars(library())
        self._functions = {name: each for name, each in self._kernels.items() if isinstance(each, dict)}
        for name, functions in self._functions.items():
            self._kernels[name] = {dtype: functools.partial(self._call, each) for dtype, each in functions.items()}
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._kernels.update(self._functions)
        self._recording.release()
        super().__exit__(*error)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.calls.append((function, args))
        function(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self._kept.append(made)
        if not func.is_view:
            self.complete &= "empty" in func.overloadpacket.__name__
        elif self.complete:
            memory = {each.untyped_storage().data_ptr() for each in pytree.tree_leaves((made, args[0]))}
            self.complete = len(memory) == 1
        return made

    def repeat(self) -> None:
        for function, args in self.calls:
            function(*args)


@functools.cache
def library() -> Library | None:
    """The compiled kernels, built at the first call if necessary (about two seconds); None if not available."""
    if os.environ.get("ATMM_COMPILED") == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        _log.warning(
            "no C++ compiler found: matrix products, attention and merges on the CPU run in plain torch, and a decode "
            "step takes up to four times as long; install g++ (Debian and Ubuntu: apt-get install g++) or set CXX, and "
            "restart"
        )
        return None
    try:
        return _loaded(compiler)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.warning("compiled CPU kernels are disabled, using plain torch: %s", _reason(error))
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd[:1])} failed: {error.stderr.strip()[-500:]}"
    return str(error)


def _loaded(compiler: str) -> Library:
    """The library from the cache folder, or compiled for this process only if that folder is not writable."""
    try:
        file = _built(compiler)
    except OSError as error:
        _log.warning(
            "compiled CPU kernels cannot be cached: %s; they are compiled at every start; set XDG_CACHE_HOME to a "
            "writable folder",
            error,
        )
        with tempfile.TemporaryDirectory(prefix="vlora-kernels-") as folder:
            return Library(_compiled(compiler, Path(folder)))  # its mapping outlives the file
    return Library(file)


def _built(compiler: str) -> Path:
    """The shared library's file. A new build is moved into place atomically, so that processes may race."""
    here = Path(__file__).parent
    digest = hashlib.sha256(repr((_FLAGS, _OWN_FLAGS, _target(compiler))).encode())
    for name in (*_HEADERS, *_SOURCES):
        digest.update((here / name).read_bytes())
    file = cache.folder() / f"atmm-{digest.hexdigest()[:16]}.so"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            os.replace(_compiled(compiler, Path(folder)), file)
    return file


def _compiled(compiler: str, folder: Path) -> Path:
    here = Path(__file__).parent
    objects = [str(folder / f"{Path(name).stem}.o") for name in _SOURCES]
    for name, made in zip(_SOURCES, objects, strict=True):
        _run(compiler, *_FLAGS, *_OWN_FLAGS.get(name, ()), "-c", str(here / name), "-o", made)
    # Linked without its own OpenMP runtime, so that it shares torch's runtime and threads.
    library_file = folder / "atmm.so"
    _run(compiler, "-shared", *objects, "-o", str(library_file))
    return library_file


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _target(compiler: str) -> str:
    """The compiler's version and target instructions: its predefined macros.

    The flags that Linux reports for the processor are no substitute: a compiler does not use them for its target.
    """
    return _run(compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
