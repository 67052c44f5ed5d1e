"""Timing of strategies: with cold caches, as in a model, where all base weights pass through them between two calls; by
turns, until the slow ones are out of the race; on a GPU by replays of a CUDA graph.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.layers import SiteGroup
from atmm.strategies.registry import NEED_NO_COPY

_OWN_CACHES_BYTES = 4 * 2**20  # more than the private caches of a core
_ALL_CACHES_BYTES = 256 * 2**20  # more than all caches of most machines; used if single lines cannot be evicted
_NUM_ROWS, _WIDTH = 4, 1024


class DeviceCaches:
    """The caches of one device, and a base layer of one dtype to displace their contents."""

    def __init__(self, device: str | torch.device, dtype: torch.dtype) -> None:
        device = torch.device(device)
        kernels = library() if device.type == "cpu" else None
        self._evict_lines = kernels.evict if kernels is not None and kernels.evict(None, 0) else None
        if device.type == "cuda":
            num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        else:
            num_bytes = _ALL_CACHES_BYTES if self._evict_lines is None else _OWN_CACHES_BYTES
        self._rows = torch.ones(_NUM_ROWS, _WIDTH, dtype=dtype, device=device)
        self._weights = torch.ones(num_bytes // dtype.itemsize // _WIDTH, _WIDTH, dtype=dtype, device=device)

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """Evict the storages of these tensors from the caches, and run the base layer."""
        if self._evict_lines is not None:
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            for address, storage in storages.items():
                self._evict_lines(address, storage.nbytes())
        torch.mm(self._rows, self._weights.t())


def factors_of(group: SiteGroup) -> list[Tensor]:
    """All inputs of a group's deltas: the factors of its sites and their packed copy."""
    return [*_own(group), *_copied(group)]


def read_by(strategy: str, group: SiteGroup) -> list[Tensor]:
    """The subset of `factors_of` that a strategy reads."""
    return _own(group) if strategy in NEED_NO_COPY else _copied(group)


def _own(group: SiteGroup) -> list[Tensor]:
    return [tensor for site in group.sites for factors in site.factors.values() for tensor in factors]


def _copied(group: SiteGroup) -> list[Tensor]:
    packed = group.packed
    return [] if packed is None else [packed.a, *packed.bts]


_FIRST_TURNS = 2  # no candidate is eliminated before
_KEPT = 0.8  # share of a candidate's calls that count, the shortest: interruptions lengthen the others


def race(
    calls: Mapping[str, Callable[[], float]], turns: int, in_race: float, enough_s: float, seed: int = 0
) -> dict[str, float]:
    """Time the candidates and return the trimmed mean in seconds of each.

    Args:
        calls: each call runs the candidate once and returns its seconds. The first call of each is a warm-up and does
            not count.
        in_race: multiple of the smallest mean so far. A candidate without any call as fast as that is eliminated. A
            single fast call is enough, because some candidates are slow in their first two or three calls and fastest
            afterwards.
        enough_s: seconds per remaining candidate after which the race ends early.
    """
    for call in calls.values():
        call()
    draw = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    running, started = list(calls), time.monotonic()
    for turn in range(1, turns + 1):
        draw.shuffle(running)
        for name in running:
            seconds[name].append(calls[name]())
        if turn < _FIRST_TURNS:
            continue
        least = min(map(trimmed_mean, seconds.values()))
        running = [name for name in running if min(seconds[name]) <= in_race * least]
        if len(running) == 1 or time.monotonic() - started > enough_s * len(running):
            break
    return {name: trimmed_mean(taken) for name, taken in seconds.items()}


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean of the shortest four fifths."""
    return statistics.fmean(sorted(seconds)[: max(1, int(_KEPT * len(seconds)))])


class Replays:
    """A call as a CUDA graph; `replays()` runs it once and returns the device's seconds.

    The first use runs the call twice: once to compile kernels and to prepare what a capture must not, once to capture
    it. The call must have the same effect on the same memory each time.

    Args:
        call: Launches work on the current stream of the current device.
        before: Launched on the stream before each replay, and not timed.
        parts: Number of equal parts of the call; the seconds are those of one.
    """

    def __init__(self, call: Callable[[], object], before: Callable[[], object] | None = None, parts: int = 1) -> None:
        self._call, self._before, self._parts = call, before, parts
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> float:
        graph = self._graph or self._captured()
        if self._before is not None:
            self._before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / self._parts

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._call()
        return self._graph
