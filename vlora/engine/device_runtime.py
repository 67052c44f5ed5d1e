"""The device state of a rank: its weights, its arena, its adapters, and the runner of batches.

Rank 0 also schedules; see `Engine`.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import torch
import transformers

import atmm
from vlora.config import EngineConfig
from vlora.engine.limits import Limits, compute_limits, shadow_fits
from vlora.engine.switching import originals_if_in_place
from vlora.lora.adapter_pool import AdapterBank, OtherRanks
from vlora.lora.base_weights import Originals
from vlora.lora.merge import ModeSwitcher
from vlora.lora.merge_in_place import InPlaceSwitcher
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import Appointed, Residency
from vlora.memory.arena import Arena
from vlora.memory.host_to_device import make_transfer
from vlora.models.hf_adapter import Seam
from vlora.models.runner import ModelRunner
from vlora.models.sharding import fingerprint
from vlora.models.vision import VisionEncoder
from vlora.models.way_costs import measure
from vlora.parallel import Group
from vlora.parallel.choice import Costs
from vlora.threads import compute_with


def set_threads(config: EngineConfig) -> int:
    """Set the configured number of threads for the calling thread, which runs the steps; other threads get one each.

    Without a setting, torch's default is divided by the ranks. Returns the number.
    """
    num_threads = config.threads or max(1, torch.get_num_threads() // config.tensor_parallel)
    compute_with(num_threads)
    return num_threads


def facts_of(config: EngineConfig, model: Any) -> dict[str, str]:
    """Values that must be equal on every rank, by name."""
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        # hidden states are exchanged in the format of these kernels
        "compiled kernels": "yes" if atmm.load_kernels() else "no",
        "model": config.model,
        "weights": fingerprint(model),
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """A loaded model with its weights in slabs, and the remaining memory. The same on all ranks, except for values.

    originals: None if merged weights are kept as a shadow copy. costs: of communication between ranks; None on a single
    rank.
    """

    seam: Seam
    slabs: WeightSlabs
    originals: Originals | None
    limits: Limits
    arena: Arena
    costs: Costs | None


def lay_out(config: EngineConfig, seam: Seam, group: Group | None, *, loaded: bool) -> Layout:
    """Put the weights into slabs, and agree with the other ranks on memory limits. Raises BadConfig.

    loaded: the weights come from config.model's files.
    """
    slabs = WeightSlabs(seam.language_linears)
    fits = _least(group, shadow_fits(config, seam, slabs.num_bytes))
    originals = originals_if_in_place(config, slabs, fits=bool(fits), loaded=loaded and group is None)
    limits = compute_limits(config, seam, slabs.num_bytes if originals is None else 0)
    limits = dataclasses.replace(limits, num_pages=_least(group, limits.num_pages))
    arena = Arena(limits.num_pages, seam.device)
    if group is None:
        # Ranks that share the cores would disturb each other's measurements, so they use the static rule.
        atmm.measure_products([*(layer.weight for layer in _linears(seam)), seam.lm_head.weight])
    costs = None if group is None else measure(group, config.max_batch_size, seam.dtype, seam.device)
    return Layout(seam, slabs, originals, limits, arena, costs)


def _linears(seam: Seam) -> Iterator[torch.nn.Linear]:
    return itertools.chain(seam.language_linears.values(), seam.vision_linears.values())


def _least(group: Group | None, value: int) -> int:
    return value if group is None else group.smallest([value], "start")[0]


class DeviceSide:
    """Built from a layout: the arena, the adapter pool, the switcher, the image encoder, the runner."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        residency: Residency | Appointed,
        *,
        executor: Executor | None = None,
        group: Group | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        """executor: loads adapters into the arena; None creates a thread."""
        seam, slabs, arena = layout.seam, layout.slabs, layout.arena
        self.bank = AdapterBank(
            arena,
            residency,
            make_transfer(seam.device, executor),
            seam.language_linears,
            seam.vision_linears,
            slabs.order,
            others,
        )
        self.bank.compile_ahead()
        self.switcher: ModeSwitcher
        if layout.originals is None:
            self.switcher = ShadowSwitcher(slabs, self.bank)
        else:
            on_gpu = seam.device.type == "cuda"
            self.switcher = InPlaceSwitcher(slabs, self.bank, layout.originals, subtracting=on_gpu)
        self.vision = VisionEncoder(seam, config.vision_cache_bytes)
        self.runner = ModelRunner(
            seam,
            arena,
            self.bank,
            self.switcher,
            self.vision,
            block_size=config.block_size,
            block_pages=layout.limits.block_pages,
            group=group,
        )
