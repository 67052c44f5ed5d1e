"""Limits that follow from the hardware and the model, computed once at start. Settings are in `EngineConfig`."""

from __future__ import annotations

import dataclasses

import psutil
import torch

from vlora.config import EngineConfig
from vlora.engine.host_resources import memory_left
from vlora.errors import BadConfig
from vlora.memory.arena import PAGE_BYTES, block_pages
from vlora.models.hf_model import HFModel

_ADAPTER_BYTES = 256 * 2**20  # for adapters, if arena_bytes is not set
_REQUEST_TOKENS = 4096  # per sequence of a batch on a CPU (images, question, answer), likewise
_CPU_SHARE = 0.4  # of free memory: the machine also runs other programs
_GPU_SHARE = 0.9  # of free memory after the shadow slabs: the rest is for activations


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of an engine.

    Attributes:
        max_context: Maximum tokens of one request, prompt and answer together.
        arena_basis: How num_pages was determined, as text.
    """

    max_context: int
    block_pages: int
    num_pages: int
    arena_basis: str

    @property
    def max_adapter_pages(self) -> int:
        """Adapters get at most half of the arena, so that requests always find room."""
        return self.num_pages // 2

    @property
    def max_request_blocks(self) -> int:
        """KV blocks that one request can always have, regardless of resident adapters."""
        return (self.num_pages - self.max_adapter_pages) // self.block_pages


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory for what an engine keeps beside its weights.

    device_type: cpu or cuda. num_bytes: free bytes that this process may use.
    """

    device_type: str
    num_bytes: int

    def share(self, shadow_bytes: int) -> int:
        """Bytes for an arena beside merged weights of `shadow_bytes`; the rest is for activations, on a CPU also for
        other programs."""
        part = _GPU_SHARE if self.device_type == "cuda" else _CPU_SHARE
        return max(0, int((self.num_bytes - shadow_bytes) * part))


def free_room(config: EngineConfig, device: torch.device) -> Room:
    """The free memory of a device. Ranks on a CPU share its memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Room("cuda", free)
    available = psutil.virtual_memory().available
    left = memory_left()
    return Room("cpu", (available if left is None else min(available, left)) // config.tensor_parallel)


def compute_limits(config: EngineConfig, hf_model: HFModel, room: Room, shadow_bytes: int) -> Limits:
    """Raises BadConfig if the arena cannot hold one request of the smallest useful size."""
    max_context = min(hf_model.max_positions, config.max_context or hf_model.max_positions)
    pages = block_pages(hf_model.num_layers, config.block_size, hf_model.kv_dim, hf_model.dtype)
    if config.arena_bytes is not None:
        num_pages, basis = config.arena_bytes // PAGE_BYTES, "arena_bytes"
    else:
        num_pages, basis = _own_size(config, room, max_context, pages, room.share(shadow_bytes))
    if num_pages < 2 * pages:
        raise BadConfig(
            f"the arena would have {num_pages} pages of {PAGE_BYTES} bytes, but one KV block of "
            f"{config.block_size} tokens takes {pages}; set arena_bytes to at least {2 * pages * PAGE_BYTES}"
        )
    return Limits(max_context, pages, num_pages // pages * pages, basis)


def _own_size(config: EngineConfig, room: Room, max_context: int, pages: int, free_bytes: int) -> tuple[int, str]:
    """Pages of an arena without a configured size, and how the number was determined.

    A model can use at most full batches of the longest requests. A GPU is dedicated to serving, so it reserves memory
    for them; a CPU shares its memory, and full batches of such long requests would take minutes per step.
    """
    on_gpu = room.device_type == "cuda"
    tokens = max_context if on_gpu else min(max_context, _REQUEST_TOKENS)
    full_batch = config.max_batch_size * -(-tokens // config.block_size)
    # one request in half of the arena, which is always available to KV
    longest = 2 * -(-max_context // config.block_size)
    wanted = max(full_batch, longest) * pages + _ADAPTER_BYTES // PAGE_BYTES
    if wanted * PAGE_BYTES > free_bytes:
        return free_bytes // PAGE_BYTES, f"{_GPU_SHARE if on_gpu else _CPU_SHARE:.0%} of free memory"
    batch = f"{config.max_batch_size} requests of {tokens:,} tokens"
    fits = batch if full_batch >= longest else f"one request of {max_context:,} tokens in each half"
    return wanted, f"{fits}, and {_ADAPTER_BYTES // 2**20} MiB of adapters"


def shadow_fits(config: EngineConfig, hf_model: HFModel, room: Room, shadow_bytes: int) -> bool:
    """Whether a shadow copy leaves room for the arena.

    The arena has its configured size, or holds at least one request of maximum context and the adapters.
    """
    if config.arena_bytes is not None:
        return config.arena_bytes <= room.num_bytes - shadow_bytes
    blocks = -(-min(hf_model.max_positions, config.max_context or hf_model.max_positions) // config.block_size)
    request_bytes = (
        blocks * block_pages(hf_model.num_layers, config.block_size, hf_model.kv_dim, hf_model.dtype) * PAGE_BYTES
    )
    return request_bytes + _ADAPTER_BYTES <= room.share(shadow_bytes)
