"""The fastest method for a product, measured at engine start on the weights of the served model.

The fastest method depends on the shape, the rows, the threads and the processor. The results are cached in a file. Its
name covers processor, versions and threads, so that later starts do not measure again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atmm import cache, matmul, processor
from atmm.cpu import library
from atmm.cpu.products import Weights
from atmm.matmul import MEASURED_ROWS, Key, Method
from atmm.tuning.timing import race

log = logging.getLogger(__name__)

LARGE = 16 * 2**20  # bytes of all weights of a shape; smaller ones stay in caches and their products are cheap
# Limits on the output features of a measured product; the second one applies with many rows. An output head has ten
# times as many features, all of the same cost.
_LONGEST, _MOST_OUTPUTS = 16_384, 16_384 * 32
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
_TURNS = 5
_ENOUGH_S = 0.03
_IN_RACE = 1.5
_MEASUREMENT = 4  # raised when results of an earlier version must not be used any more
_MARGIN = 0.93  # of the rule's time: smaller gains are noise, and choices that differ between starts change rounding

TASKS = Path("/proc/self/task")
_MOST = 0.05  # share of the time; an idle machine has less than 0.01


def measure(weights: Sequence[Tensor], clock: Callable[[], float] = time.perf_counter) -> None:
    """Measure the fastest method for products with these weights, unless an earlier start has measured it.

    Takes seconds once per shape, processor and number of threads. Afterwards `atmm.matmul.choose` uses the result.
    Measurements disturbed by other processes are discarded: the rule decides, and the next start measures again.

    Args:
        weights: [d_out, d_in] of the layers of a model; weights that are not on the CPU are ignored.
    """
    name = f"products-{_machine()}.json"
    known = _read(name)
    fresh: dict[Key, Method] = {}
    overrides: list[tuple[Key, list[Tensor]]] = []
    contention = Contention()
    started = time.monotonic()
    for layers in _by_shape(weights):
        for num_rows in MEASURED_ROWS:
            key = matmul.key_of(num_rows, layers[0])
            if key not in known and key not in fresh:
                fresh[key] = _fastest(num_rows, layers, clock)
                if fresh[key] != matmul.rule(num_rows, layers[0]):
                    overrides.append((key, layers))
    # A pause of a virtual processor, which `Contention` cannot see, can lengthen all timings of a method. An override
    # therefore counts only if a second measurement, seconds later, has the same result.
    for key, layers in overrides:
        if _fastest(key[0], layers, clock) != fresh[key]:
            fresh[key] = matmul.rule(key[0], layers[0])
    matmul.measured.update(known)
    if fresh and contention.disturbs():
        log.warning("matrix products use the default rule: other processes disturbed the measurement")
    elif fresh:
        matmul.measured.update(fresh)
        log.info("measured %d shapes of matrix products in %.1f s", len(fresh), time.monotonic() - started)
        _write(name, known | fresh)
    matmul.forget_choices()


def _by_shape(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    shapes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        if weight.device.type == "cpu":
            shapes.setdefault((weight.shape, weight.dtype), []).append(weight)
    return [layers for layers in shapes.values() if sum(layer.nbytes for layer in layers) >= LARGE]


def _fastest(num_rows: int, layers: Sequence[Tensor], clock: Callable[[], float]) -> Method:
    """The fastest method, or the rule's if no method is faster by more than noise."""
    with torch.inference_mode():
        ruled = matmul.rule(num_rows, layers[0])
        x = torch.randn(num_rows, layers[0].shape[1]).to(layers[0].dtype)
        # Rotate through the layers, so that none is in a cache.
        num_features = min(_LONGEST, _MOST_OUTPUTS // num_rows)
        turns = itertools.cycle(Weights(layer[:num_features], None) for layer in layers)

        def timed(method: Method) -> Callable[[], float]:
            def call() -> float:
                layer = next(turns)
                started = clock()
                matmul.METHODS[method](x, (layer,))
                return clock() - started

            return call

        methods = matmul.methods(num_rows, layers[0])
        seconds = race({method: timed(method) for method in methods}, _TURNS, _IN_RACE, _ENOUGH_S)
    best = min(methods, key=seconds.__getitem__)
    return best if seconds[best] < _MARGIN * seconds[ruled] else ruled


def _machine() -> str:
    """A digest of everything but the shape that affects the fastest method."""
    kernels = "compiled" if library() is not None else "plain"
    facts = (
        platform.machine(),
        sorted(processor.flags()),
        torch.__version__,
        torch.get_num_threads(),
        kernels,
        MEASURED_ROWS,
        _MEASUREMENT,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(name: str) -> dict[Key, Method]:
    """The results of an earlier start; empty without a file of this version."""
    try:
        found = json.loads((cache.folder() / name).read_text())
        return {
            (int(rows), int(d_out), int(d_in), _DTYPES[dtype]): method
            for rows, d_out, d_in, dtype, method in found
            if method in matmul.METHODS
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("matrix products are measured again: %s cannot be read: %s", name, error)
        return {}


def _write(name: str, known: dict[Key, Method]) -> None:
    try:
        rows = sorted(
            [num_rows, d_out, d_in, str(dtype), method] for (num_rows, d_out, d_in, dtype), method in known.items()
        )
        cache.replace(cache.folder() / name, json.dumps(rows))
    except OSError as error:
        log.warning(
            "matrix products are measured at every start: the result cannot be cached: %s; set XDG_CACHE_HOME to a "
            "writable folder",
            error,
        )


class Contention:
    """The time since construction in which threads of this process were runnable but had no core.

    Only Linux reports it; on other systems every measurement counts as undisturbed.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_s = _waited_s()

    def disturbs(self) -> bool:
        """Whether timings since construction were disturbed by other load."""
        return _waited_s() - self._before_s > _MOST * (time.monotonic() - self._began_s)


def _waited_s() -> float:
    """Run-queue wait in seconds, summed over the current threads (proc(5): schedstat, nanoseconds)."""
    waited = 0
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9
