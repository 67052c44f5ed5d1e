"""What putting another adapter into the weights costs, against PEFT's `merge_adapter` and against one copy of the
weights.

The floor is bytes: out of place, merging reads W0 once and writes the shadow once, which is what one copy does.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from vlora.adapters import AdapterRegistry, HostAdapter, SiteShape
from vlora.bench.dummy import half_billion_config, language_shapes, write_adapter
from vlora.bench.form import Goal, Report
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.books import ArenaBooks
from vlora.memory.residency import Residency
from vlora.models.bank import AdapterBank
from vlora.models.loading import dummy_model
from vlora.models.seam import Seam
from vlora.models.shadow import ShadowSwitcher
from vlora.models.slabs import WeightSlabs


def run(quick: bool) -> Report:
    """Merge, going back, PEFT's merge and one copy, for a 0.5 B-parameter model in bfloat16, one thread."""
    torch.set_num_threads(1)
    rounds = 3 if quick else 9
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for rank, goal in ((8, 6.0), (64, 4.0)):
        seconds = interleaved(_calls(rank), rounds, warmup=1)
        speedup = median_ratio(seconds["PEFT merge"], seconds["merge"])
        rows.append(
            {
                "rank": rank,
                "merge ms": median_ms(seconds["merge"]),
                "back ms": median_ms(seconds["back"]),
                "copy ms": median_ms(seconds["copy"]),
                "merge / copy": median_ratio(seconds["merge"], seconds["copy"]),
                "PEFT merge ms": median_ms(seconds["PEFT merge"]),
                "PEFT unmerge ms": median_ms(seconds["PEFT unmerge"]),
                "PEFT / ours": speedup,
            }
        )
        goals.append(Goal(f"PEFT merge_adapter / merge, rank {rank}", speedup, goal, False))
        goals.append(Goal(f"going back to W0, rank {rank}, ms", median_ms(seconds["back"]), 1.0, True))
    return Report("merge", rows, goals)


def _calls(rank: int) -> dict[str, Callable[[], object]]:
    """What is timed, in the order it must run in: each round merges the other of two adapters and goes back."""
    cpu = torch.device("cpu")
    seam = Seam(dummy_model(half_billion_config(), "bfloat16", cpu, seed=0))
    shapes = language_shapes(seam.model)
    slabs = WeightSlabs(seam.language_linears)
    arena = Arena(2**30 // PAGE_BYTES, cpu)
    residency = Residency(ArenaBooks(arena.num_pages, 1), arena.num_pages)
    bank = AdapterBank(arena, residency, seam.language_linears, seam.vision_linears, slabs.order)
    switcher = ShadowSwitcher(slabs, bank)
    sites = {
        name: SiteShape(linear.in_features, linear.out_features, vision=False)
        for name, linear in seam.language_linears.items()
    }
    registry = AdapterRegistry(sites, seam.dtype, seam.hidden_size)
    adapters: list[HostAdapter] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            path = write_adapter(Path(folder) / name, shapes, rank, seed=len(adapters))
            adapters.append(registry.load(name, path))
            assert bank.bring(adapters[-1])
    turns = itertools.cycle(adapters)
    copies = {shape: torch.empty_like(slab) for shape, slab in slabs.base.items()}
    peft = get_peft_model(
        dummy_model(half_billion_config(), "bfloat16", cpu, seed=0),
        LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=rf".*language_model.*\.({'|'.join(sorted({name.rpartition('.')[2] for name in shapes}))})",
            init_lora_weights=False,
        ),
    ).to(torch.bfloat16)

    def copy() -> None:
        for shape, slab in slabs.base.items():
            copies[shape].copy_(slab)

    calls: dict[str, Callable[[], object]] = {
        "merge": lambda: switcher.switch(next(turns).key),
        "back": lambda: switcher.switch(None),
        "copy": copy,
        "PEFT merge": peft.merge_adapter,
        "PEFT unmerge": peft.unmerge_adapter,
    }
    return {name: torch.no_grad()(call) for name, call in calls.items()}
