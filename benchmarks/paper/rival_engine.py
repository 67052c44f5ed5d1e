"""A server with an engine of another system's operator and switch: S-LoRA's, Punica's and dLoRA's, in plain torch.

`python -m benchmarks.paper.rival_engine SYSTEM CONFIG ADAPTERS` starts the server; the two JSON arguments are fields of
`EngineConfig` and folders by adapter. With a descriptor as its second argument it is the engine's process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from atmm.layers import Packed, Site
from atmm.segments import Lane, SegmentPlan, Strategy
from vlora.config import EngineConfig, ServerConfig
from vlora.engine.engine import Engine
from vlora.engine.ipc.worker import run
from vlora.server.launch import serve

_KEPT = 512  # stacked factors, by site and adapters


class LaneOperator(Strategy):
    """One plan's strategy. add: of the lanes with factors at a site."""

    def __init__(self, add: Callable[[Sequence[Lane], Site, Tensor, Tensor], None], plan: SegmentPlan) -> None:
        self._add, self._lanes = add, plan.lanes

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        if lanes := [lane for lane in self._lanes if lane.key in site.factors]:
            self._add(lanes, site, x, y)


_stacks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}


def stacked(site: Site, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Factors [adapters, rank, d_in] and [adapters, rank, d_out], lower ranks padded with zeros; kept for later steps,
    as systems keep them that have all adapters of a batch in one tensor.
    """
    pairs = [site.factors[key] for key in keys]
    name = (id(site), *(pair.a.data_ptr() for pair in pairs))
    if name not in _stacks:
        if len(_stacks) >= _KEPT:
            _stacks.clear()
        rank = max(len(pair.a) for pair in pairs)
        a, bt = (
            torch.stack([F.pad(getattr(pair, which), (0, 0, 0, rank - len(pair.a))) for pair in pairs])
            for which in ("a", "bt")
        )
        _stacks[name] = a, bt
    return _stacks[name]


def padded_einsum(lanes: Sequence[Lane], site: Site, x: Tensor, y: Tensor) -> None:
    """dLoRA: segments padded to the longest, one einsum per factor, which is a batched product."""
    a, bt = stacked(site, [lane.key for lane in lanes])
    longest = max(lane.stop - lane.start for lane in lanes)
    padded = x.new_zeros(len(lanes), longest, x.shape[1])
    for place, lane in enumerate(lanes):
        padded[place, : lane.stop - lane.start] = x[lane.start : lane.stop]
    deltas = torch.bmm(torch.bmm(padded, a.transpose(1, 2)), bt)
    for place, lane in enumerate(lanes):
        y[lane.start : lane.stop].add_(deltas[place, : lane.stop - lane.start], alpha=lane.sign)


def loop(lanes: Sequence[Lane], site: Site, x: Tensor, y: Tensor) -> None:
    """Punica without its GPU kernel: the segments one after the other, each of its adapter's rank."""
    for key, start, stop, sign in lanes:
        a, bt = site.factors[key]
        y[start:stop].add_(F.linear(x[start:stop], a) @ bt, alpha=sign)


def gather(lanes: Sequence[Lane], site: Site, x: Tensor, y: Tensor) -> None:
    """S-LoRA without its GPU kernel: the factors of each token are gathered, then two batched products."""
    keys = sorted({lane.key for lane in lanes})
    a, bt = stacked(site, keys)
    rows = torch.tensor([row for lane in lanes for row in range(lane.start, lane.stop)], device=x.device)
    owner = torch.tensor(
        [keys.index(lane.key) for lane in lanes for _ in range(lane.start, lane.stop)], device=x.device
    )
    signs = x.new_tensor([lane.sign for lane in lanes for _ in range(lane.start, lane.stop)])
    for own, of, sign in zip(*(each.split(_GATHERED) for each in (rows, owner, signs)), strict=True):
        hidden = torch.bmm(a[of], x[own, :, None]) * sign[:, None, None]
        y.index_add_(0, own, torch.bmm(hidden.transpose(1, 2), bt[of])[:, 0])


_GATHERED = 64
"""Tokens at a time, so that gathered factors of a prompt stay within memory."""


class MergeAdapter:
    """dLoRA's switch, PEFT's `merge_adapter`: a product and an addition per layer, undone by a subtraction."""

    in_place = True
    shows_late = False

    def __init__(self, slabs: Any, pool: Any, **_: Any) -> None:
        self._slabs, self._pool = slabs, pool
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        if key == self.merged_key:
            return False
        if self.merged_key is not None:
            self._add(self.merged_key, -1)
        self.merged_key = None
        if key is not None:
            self._add(key, 1)
            self.merged_key = key
        return True

    def forget(self, key: str) -> None:
        if key == self.merged_key:
            self.switch(None)

    def show(self, *, merged: bool | None = None) -> None:
        """Nothing: layers always have the memory of W0, which a merge changes."""

    def _add(self, key: str, sign: int) -> None:
        for name in self._pool.shapes(key):
            if name in self._slabs.slots:
                a, bt = self._pool.stacked(key, (name,))
                self._slabs.entry(name).add_(bt[0].t() @ a[0], alpha=sign)


class System(NamedTuple):
    """A serving system. add: its operator, and switcher: its way to merge; None for this project's."""

    policy: str
    add: Callable[[Sequence[Lane], Site, Tensor, Tensor], None] | None = None
    switcher: Callable[..., Any] | None = None


SYSTEMS = {
    "cost_based (default here)": System("cost_based"),
    "Algorithm 1 (V-LoRA)": System("algorithm1"),
    "merged only": System("merged_only"),
    "unmerged only": System("unmerged_only"),
    "S-LoRA": System("unmerged_only", gather),
    "Punica": System("unmerged_only", loop),
    "dLoRA": System("dlora", padded_einsum, MergeAdapter),
}


def install(system: System) -> None:
    """Give all engines of this process the system's operator and switch."""
    if system.add is not None:
        add = system.add

        def strategy(plan: SegmentPlan, packed: Packed | None, x: Tensor, y: Tensor, site: Site) -> Strategy:
            return plan.prepared.setdefault(("rival",), LaneOperator(add, plan))

        mock.patch("atmm.operator._strategy", strategy).start()
    if system.switcher is not None:
        mock.patch("vlora.engine.device_runtime.ShadowSwitcher", system.switcher).start()


def run_server(name: str, config: dict[str, Any], adapters: dict[str, str]) -> None:
    command = (sys.executable, "-m", "benchmarks.paper.rival_engine", name)
    ports = ServerConfig(rpyc_port=0, http_port=0, request_timeout_s=600, max_requests=1024)
    settings = {"prefix_cache": False, "vision_cache_bytes": 0, "policy": SYSTEMS[name].policy, **config}
    announce = functools.partial(print, flush=True)
    served = serve(
        EngineConfig(**settings), ports, adapters, announce=announce, model_name="base", engine_command=command
    )
    asyncio.run(served)


def run_engine(name: str, descriptor: int) -> int:
    install(SYSTEMS[name])
    return run(descriptor, Engine)


if __name__ == "__main__":
    logging.disable_progress_bar()
    if len(sys.argv) == 3:
        sys.exit(run_engine(sys.argv[1], int(sys.argv[2])))
    run_server(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
