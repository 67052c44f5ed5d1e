"""Which way merged weights come into place: decided once, at start, by what the user asked for and by memory."""

from __future__ import annotations

import logging

from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.lora.base_weights import CheckpointOriginals, CopiedOriginals, Originals, checkpoint_files
from vlora.lora.weight_slabs import WeightSlabs

log = logging.getLogger(__name__)


def originals_if_in_place(config: EngineConfig, slabs: WeightSlabs, *, fits: bool, loaded: bool) -> Originals | None:
    """What in-place switching goes back to; None where a shadow copy is kept instead.

    fits: memory has room for a shadow copy. loaded: the weights are those of config.model's files. Weights that no
    safetensors file holds (random ones, a model given in memory, a rank's part) are copied to a temporary file.

    Raises BadConfig where in_place was asked for and cannot be exact.
    """
    size = f"{slabs.num_bytes / 2**20:.0f} MiB"
    if config.switching == "shadow" or (config.switching == "auto" and fits):
        reason = "asked for" if config.switching == "shadow" else "memory allows"
        log.info("switching: shadow (%s), which takes %s beside the weights", reason, size)
        return None
    try:
        files = checkpoint_files(config.model) if loaded and config.load_format == "auto" else []
        originals = CheckpointOriginals(files, slabs) if files else CopiedOriginals(slabs)
    except BadConfig as error:
        if config.switching == "in_place":
            raise
        log.warning("switching: shadow, although its %s leave little memory: %s", size, error)
        return None
    if config.switching == "in_place":
        log.info("switching: in_place (asked for), which saves the %s of a shadow copy", size)
    else:
        log.warning(
            "switching: in_place, since memory has no room for a shadow copy of %s; every switch is a pass over the "
            "weights. A smaller arena_bytes or max_context makes room; switching shadow insists",
            size,
        )
    return originals
