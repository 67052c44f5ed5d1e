"""How merged weights are put in place: decided once, at start, by the configuration and by memory."""

from __future__ import annotations

import logging

from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.lora.base_weights import CheckpointOriginals, CopiedOriginals, Originals, checkpoint_files
from vlora.lora.weight_slabs import WeightSlabs

log = logging.getLogger(__name__)


def originals_if_in_place(config: EngineConfig, slabs: WeightSlabs, *, fits: bool, loaded: bool) -> Originals | None:
    """The original weights that in-place switching restores; None if a shadow copy is kept instead.

    Weights that are in no safetensors file (random ones, a model given in memory, a rank's shard) are copied to a
    temporary file.

    Args:
        config: The configuration.
        slabs: The weights.
        fits: Whether memory has room for a shadow copy.
        loaded: Whether the weights are those of config.model's files.

    Raises:
        BadConfig: in_place is configured and cannot be exact.
    """
    size = f"{slabs.num_bytes / 2**20:.0f} MiB"
    if config.switching == "shadow" or (config.switching == "auto" and fits):
        reason = "asked for" if config.switching == "shadow" else "memory allows"
        log.info("switching: shadow (%s), using %s in addition to the weights", reason, size)
        return None
    try:
        files = checkpoint_files(config.model) if loaded and config.load_format == "auto" else []
        originals = CheckpointOriginals(files, slabs) if files else CopiedOriginals(slabs)
    except BadConfig as error:
        if config.switching == "in_place":
            raise
        log.warning("switching: shadow, although its %s leave little free memory: %s", size, error)
        return None
    if config.switching == "in_place":
        log.info("switching: in_place (configured), which saves the %s of a shadow copy", size)
    else:
        log.warning(
            "switching: in_place, since memory has no room for a shadow copy of %s; every switch is a pass over the "
            "weights. A smaller arena_bytes or max_context makes room; set switching to shadow to force a copy",
            size,
        )
    return originals
