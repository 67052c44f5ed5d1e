"""How each adapter is sharded over several ranks: as configured, otherwise as predicted to be faster.

The decision is in the log and in the adapter's status.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vlora.config import EngineConfig
from vlora.lora import SiteShape
from vlora.lora.peft_format import AdapterHeader
from vlora.parallel.adapter_sharding import Way
from vlora.parallel.choice import Costs, Layer, choose

log = logging.getLogger(__name__)


class Ways:
    """Decides once per registration, on rank 0. groups: by layer, the layers that read the same input."""

    def __init__(
        self,
        config: EngineConfig,
        sites: Mapping[str, SiteShape],
        groups: Mapping[str, str],
        dtype: torch.dtype,
        costs: Costs,
    ) -> None:
        self._config = config
        self._sites = sites
        self._groups = groups
        self._dtype = dtype
        self._costs = costs

    def __call__(self, name: str, header: AdapterHeader) -> Way:
        """See `AdapterRegistry`'s Choose."""
        through = next((target for target in header.targets if target.cut.densified is not None), None)
        if through is not None and through.blocks is not None:
            log.warning(
                "adapter %r has %d blocks, which %d ranks do not divide evenly; it is served dense, including zeros",
                name,
                through.blocks.num,
                self._config.tensor_parallel,
            )
        asked = self._config.sharding_of(name)
        if asked != "auto":
            return "slora" if asked == "slora" else "replicated"
        layers = [
            Layer(target.rank, shard, self._groups[target.site])
            for target in header.targets
            if target.blocks is None and (shard := self._sites[target.site].shard) is not None and not target.vision
        ]
        found = choose(layers, self._dtype.itemsize, self._costs)
        if layers:
            log.info(
                "adapter %r: %s (predicted for %d tokens a step: replicated %.3f ms, slora %.3f ms)",
                name,
                found.way,
                self._costs.num_tokens,
                1e3 * found.replicated_s,
                1e3 * found.slora_s,
            )
        return found.way
