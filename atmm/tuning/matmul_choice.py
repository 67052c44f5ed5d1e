"""The fastest way for a product, measured on the weights of the model that an engine serves, at start.

Which way wins depends on the shape, the rows, the threads and the processor. What was measured is kept in the cache
folder under a name that covers processor, versions and threads, so that later starts measure nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atmm import cache, matmul, processor
from atmm.cpu import library
from atmm.cpu.products import Weights
from atmm.matmul import Key, Way
from atmm.tuning.contention import Contention
from atmm.tuning.racing import race

log = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_LARGE = 16 * 2**20  # bytes of all weights of a shape; fewer stay in caches, and their products cost next to nothing
# Products that are measured have at most so many features, and with many rows fewer: an output head has ten times as
# many, all alike.
_LONGEST, _MOST_OUTPUTS = 16_384, 16_384 * 32
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
_TURNS = 5
_ENOUGH_S = 0.03
_IN_RACE = 1.5
_MARGIN = 0.93  # of the rule's time: less is noise, and a choice that changes between starts changes rounding


def measure(weights: Sequence[Tensor], clock: Callable[[], float] = time.perf_counter) -> None:
    """Measure how products with these weights are fastest, unless that is known from an earlier start.

    weights: [d_out, d_in] of a model's layers on the CPU. Takes seconds once per shape, processor and number of
    threads. From then on `atmm.matmul.choose` follows it. What is measured while other processes take the cores is
    discarded: the rule decides, and the next start measures.
    """
    name = f"products-{_machine()}.json"
    known = _read(name)
    fresh: dict[Key, Way] = {}
    contention = Contention()
    started = time.monotonic()
    for layers in _by_shape(weights):
        for num_rows in _ROWS:
            key = matmul.key_of(num_rows, layers[0])
            if key not in known and key not in fresh:
                fresh[key] = _fastest(num_rows, layers, clock)
    matmul.measured.update(known)
    if fresh and contention.disturbs():
        log.warning("products are chosen by rule: other processes took the cores while they were to be measured")
    elif fresh:
        matmul.measured.update(fresh)
        log.info("measured %d kinds of products in %.1f s", len(fresh), time.monotonic() - started)
        _write(name, known | fresh)


def _by_shape(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    shapes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        if weight.device.type == "cpu":
            shapes.setdefault((weight.shape, weight.dtype), []).append(weight)
    return [layers for layers in shapes.values() if sum(layer.nbytes for layer in layers) >= _LARGE]


def _fastest(num_rows: int, layers: Sequence[Tensor], clock: Callable[[], float]) -> Way:
    """The way that takes least, or the rule's where nothing is faster by more than noise."""
    with torch.inference_mode():
        ruled = matmul.rule(num_rows, layers[0])
        x = torch.randn(num_rows, layers[0].shape[1]).to(layers[0].dtype)
        # One layer after the other, so that none is in a cache.
        num_features = min(_LONGEST, _MOST_OUTPUTS // num_rows)
        turns = itertools.cycle(Weights(layer[:num_features], None) for layer in layers)

        def timed(way: Way) -> Callable[[], float]:
            def call() -> float:
                layer = next(turns)
                started = clock()
                matmul.WAYS[way](x, (layer,))
                return clock() - started

            return call

        ways = matmul.ways(num_rows, layers[0])
        seconds = race({way: timed(way) for way in ways}, _TURNS, _IN_RACE, _ENOUGH_S)
    best = min(ways, key=seconds.__getitem__)
    return best if seconds[best] < _MARGIN * seconds[ruled] else ruled


def _machine() -> str:
    """A digest of what decides which way is fastest, besides the shape."""
    kernels = "compiled" if library() is not None else "plain"
    facts = (
        platform.machine(),
        sorted(processor.flags()),
        torch.__version__,
        torch.get_num_threads(),
        kernels,
        _ROWS,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(name: str) -> dict[Key, Way]:
    """What an earlier start measured; nothing where there is no file, or none of this version."""
    try:
        found = json.loads((cache.folder() / name).read_text())
        return {
            (int(rows), int(d_out), int(d_in), _DTYPES[dtype]): way
            for rows, d_out, d_in, dtype, way in found
            if way in matmul.WAYS
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("products are measured again: %s cannot be read: %s", name, error)
        return {}


def _write(name: str, known: dict[Key, Way]) -> None:
    try:
        file = cache.folder() / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}.new")
        rows = sorted([num_rows, d_out, d_in, str(dtype), way] for (num_rows, d_out, d_in, dtype), way in known.items())
        fresh.write_text(json.dumps(rows))
        os.replace(fresh, file)
    except OSError as error:
        log.warning(
            "products are measured at every start: the result cannot be kept: %s; set XDG_CACHE_HOME to a folder that "
            "can be written",
            error,
        )
