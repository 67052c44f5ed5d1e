"""The device state of a rank: its weights, its arena, its adapters, and the runner of batches.

Rank 0 also schedules; see `Engine`.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import torch
import transformers

import atmm
from atmm.quantized import HeldWeight, quantized_empty
from vlora.config import EngineConfig
from vlora.engine.limits import Limits, compute_limits, free_room, shadow_fits
from vlora.engine.quantize import format_of
from vlora.errors import BadConfig
from vlora.lora.adapter_pool import AdapterPool, OtherRanks
from vlora.lora.base_weights import BaseWeights, CheckpointBaseWeights, CopiedBaseWeights, checkpoint_files, copy_mapped
from vlora.lora.layer_reading import BaseLayers
from vlora.lora.merge import ModeSwitcher, ShadowSwitcher
from vlora.lora.merge_fidelity import MergeFidelity
from vlora.lora.merge_in_place import InPlaceSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache, WorkerAdapterCache
from vlora.memory.arena import Arena, empty
from vlora.memory.host_to_device import SideStream, make_transfer
from vlora.models.hf_model import HFModel
from vlora.models.loading import device_of
from vlora.models.runner import ModelRunner
from vlora.models.sharding import fingerprint
from vlora.models.vision.encoder import VisionEncoder
from vlora.parallel.process_group import ProcessGroup
from vlora.threads import compute_with, launch_on

log = logging.getLogger(__name__)


def set_threads(config: EngineConfig) -> int:
    """Set the configured number of threads for the calling thread, which runs the steps; other threads get one each.

    Without a setting, torch's default is divided by the ranks. Returns the number.
    """
    num_threads = config.threads or max(1, torch.get_num_threads() // config.tensor_parallel)
    compute_with(num_threads)
    return num_threads


def use_device(device: torch.device) -> None:
    """Make a device the calling thread's current one, and set what steps on a GPU need in this process."""
    launch_on(device)
    if device.type == "cuda":
        # On compute capability 9.0 torch prefers cuDNN, which takes 0.1 to 0.4 s to plan each new shape; the context's
        # length changes with every decode step (docs/decisions/0045).
        torch.backends.cuda.enable_cudnn_sdp(False)


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
class MemoryLayout:
    """A loaded model with its weights in slabs, and the remaining memory. The same on all ranks, except for values.

    base_weights: None if merged weights are kept as a shadow copy.
    """

    hf_model: HFModel
    slabs: WeightSlabs
    base_weights: BaseWeights | None
    limits: Limits
    arena: Arena


def lay_out(config: EngineConfig, hf_model: HFModel, group: ProcessGroup | None, *, loaded: bool) -> MemoryLayout:
    """Put the weights into slabs, and agree with the other ranks on memory limits. Raises BadConfig.

    loaded: the weights come from config.model's files.
    """
    device = device_of(config, 0) if loaded and group is None else hf_model.device
    on_gpu = device.type == "cuda"
    weight_format = format_of(config, device, hf_model)
    if weight_format is None:
        slabs = WeightSlabs(hf_model.language_linears, join=on_gpu)  # a CPU multiplies them separately
    else:  # the input of several layers is rounded once
        allocate = quantized_empty(weight_format, device, empty)
        slabs = WeightSlabs(hf_model.language_linears, join=True, allocate=allocate)
        hf_model.move(device)
        if config.quantize_head:
            head = hf_model.lm_head  # with tied embeddings the parameter stays theirs
            head.hold(HeldWeight.of(allocate(head.weight.shape, head.weight.dtype, device).copy_(head.weight.data)))
    copy_mapped(hf_model.model)
    if on_gpu:
        # The memory of the weights before their copy into slabs: torch keeps it, and the driver counts it as used.
        torch.cuda.empty_cache()
    fits = _smallest(group, shadow_fits(config, hf_model, free_room(config, hf_model.device), slabs.num_bytes))
    base_weights = base_weights_if_in_place(config, slabs, fits=bool(fits), loaded=loaded and group is None)
    room = free_room(config, hf_model.device)
    limits = compute_limits(config, hf_model, room, slabs.num_bytes if base_weights is None else 0)
    limits = dataclasses.replace(limits, num_pages=_smallest(group, limits.num_pages))
    # One block more on a GPU, which nothing allocates: the padding rows of decode steps use it.
    padding = limits.block_pages if hf_model.device.type == "cuda" else 0
    arena = Arena(limits.num_pages + padding, hf_model.device)
    if group is None:
        # Ranks that share the cores would disturb each other's measurements, so they use the static rule.
        atmm.measure_products(list(_plain_weights(hf_model)))
    return MemoryLayout(hf_model, slabs, base_weights, limits, arena)


def base_weights_if_in_place(
    config: EngineConfig, slabs: WeightSlabs, *, fits: bool, loaded: bool
) -> BaseWeights | None:
    """The original weights that in-place switching restores; None if a shadow copy is kept instead.

    Weights that are in no safetensors file (random ones, a model given in memory, a rank's shard) are copied to a
    temporary file.

    Args:
        fits: Whether memory has room for a shadow copy.
        loaded: Whether the weights are those of config.model's files.

    Raises:
        BadConfig: in_place is configured and cannot be exact.
    """
    size = f"{slabs.num_bytes / 2**20:.0f} MiB"
    if config.quantize != "none" and not fits:
        log.warning("switching: shadow, although its %s leave little free memory: the weights are quantized", size)
        return None
    if config.switching == "shadow" or (config.switching == "auto" and fits):
        reason = "asked for" if config.switching == "shadow" else "memory allows"
        log.info("switching: shadow (%s), using %s in addition to the weights", reason, size)
        return None
    try:
        files = checkpoint_files(config.model) if loaded and config.load_format == "auto" else []
        base_weights = CheckpointBaseWeights(files, slabs) if files else CopiedBaseWeights(slabs)
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
    return base_weights


def _plain_weights(hf_model: HFModel) -> Iterator[torch.Tensor]:
    linears = (*hf_model.language_linears.values(), *hf_model.vision_linears.values(), hf_model.lm_head)
    return (linear.weight for linear in linears if linear.quantized is None)


def _smallest(group: ProcessGroup | None, value: int) -> int:
    return value if group is None else group.smallest([value], "start")[0]


class DeviceRuntime:
    """A rank's layout, and what is built on it: the adapter pool, the switcher, the image encoder, the runner."""

    def __init__(
        self,
        config: EngineConfig,
        layout: MemoryLayout,
        adapter_cache: AdapterCache | WorkerAdapterCache,
        *,
        executor: Executor | None = None,
        group: ProcessGroup | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        """executor: loads adapters into the arena; None creates a thread."""
        hf_model, slabs, arena = layout.hf_model, layout.slabs, layout.arena
        self.hf_model, self.slabs, self.arena, self.limits = hf_model, slabs, arena, layout.limits
        self.pool = AdapterPool(
            arena,
            adapter_cache,
            make_transfer(hf_model.device, executor),
            hf_model.language_linears,
            hf_model.vision_linears,
            slabs.order,
            others,
            hf_model.own.by_name,
        )
        self.pool.compile_ahead()
        self.switcher: ModeSwitcher
        on_gpu = hf_model.device.type == "cuda"
        stream: SideStream | None = None
        merged_shapes = slabs.shapes
        if layout.base_weights is None:
            self.switcher = ShadowSwitcher(slabs, self.pool, complete=on_gpu or bool(slabs.groups))
            stream = SideStream(hf_model.device) if on_gpu else None
        else:
            self.switcher = in_place = InPlaceSwitcher(slabs, self.pool, layout.base_weights, subtracting=on_gpu)
            merged_shapes |= in_place.sampled_shapes
        if on_gpu:
            merged_dtype = hf_model.dtype if config.quantize == "none" else torch.float32
            atmm.compile_merges(merged_shapes, merged_dtype, hf_model.device)
            if config.quantize != "none":
                atmm.compile_quantized_merges(merged_shapes, slabs.allocate, hf_model.dtype, hf_model.device)
                weights = (*(joined[0] for joined in slabs.joined), hf_model.lm_head.stored)
                atmm.compile_products(weights, hf_model.dtype, hf_model.device)
        self.merge_fidelity = MergeFidelity(slabs, layout.base_weights, stream)
        unmerged = {**hf_model.vision_linears, **{name: own.layer for name, own in hf_model.own.by_name.items()}}
        self.base_layers = BaseLayers(slabs, unmerged, layout.base_weights, stream)
        self.vision = VisionEncoder(hf_model, config.vision_cache_bytes)
        self.runner = ModelRunner(
            hf_model,
            arena,
            self.pool,
            self.switcher,
            self.vision,
            block_size=config.block_size,
            block_pages=layout.limits.block_pages,
            group=group,
        )
        self.runner.gpu.compile_ahead(hf_model, config.max_batch_size)
        if on_gpu and config.cuda_graphs and self.runner.gpu.decodes and group is None:
            num_blocks = self.limits.num_pages // self.limits.block_pages
            max_context = min(self.limits.max_context, num_blocks * config.block_size)
            self.runner.capture(config.max_batch_size, config.step_tokens, max_context, num_blocks)
