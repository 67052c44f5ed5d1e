"""State of the engine: adapters and counters, as policies, operators and metrics see them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vlora.types.domain import DomainSummary
from vlora.types.training import TrainingStatus
from vlora.types.visibility import WITHOUT_PLACES


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter memory state for policies.

    resident: adapters on the device. mergeable: adapters with sufficient merge fidelity. loading: needed adapters
    that are being read or loaded; requests for them wait for the load, not for free memory.
    """

    resident: frozenset[str]
    mergeable: frozenset[str]
    loading: frozenset[str] = frozenset()


class HeadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One task head as clients see it. prompt: the question it was trained with. num_frames: images it expects."""

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered adapter as operators see it. version: content hash. merge_fidelity: 1.0 is lossless.

    pinned: an operator keeps it on the device. sharding: its sharding on several ranks (replicated, slora, bd). loaded:
    its content was read, at load or at first use; until then version is empty, merge_fidelity 0 and mergeable False.
    error: why it cannot be served, after reading failed. num_loads: number of loads of this content to the device.
    warnings: how the prompts that it is served with differ from those of its training.
    domains: as its folder declares them, or one for each head.
    """

    name: str
    version: str
    rank: int
    num_bytes: int
    resident: bool
    mergeable: bool
    merge_fidelity: float
    touches_vision: bool
    heads: tuple[HeadSummary, ...]
    pinned: bool = False
    sharding: str | None = None
    loaded: bool = True
    error: Annotated[str | None, WITHOUT_PLACES] = None
    num_loads: int = 0
    warnings: tuple[str, ...] = ()
    domains: tuple[DomainSummary, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started. requests_by_mode counts a request under each mode it took a step in.

    num_cancelled: requests ended by the caller, including answers that reached a stop string. Fields from arena_bytes
    to vision_cache_bytes: memory and caches, which the engine adds to the scheduler's counters.
    cached_blocks: free blocks with content that is kept for reuse. kv_bytes: KV blocks in use. cached_kv_bytes: KV of
    cached_blocks. num_computed_tokens, num_reused_tokens: prompt tokens computed, and found in the prefix cache.
    num_step_tokens: tokens of prompts and answers that steps computed. num_needed_tokens: those computed for the first
    time; the others lost their KV in a preemption. num_waiting_for_kv: waiting requests without enough free KV
    blocks, including preempted ones.
    host_adapter_bytes: adapters in host memory. num_restarts: earlier processes of this engine that died.
    relocated_bytes: bytes moved within the arena to make room for adapters.
    num_adapter_hits, num_adapter_misses: requests that found, or did not find, their adapter on the device at arrival.
    highest_credit_s: highest credit of any request (V-LoRA section 4.4.3); 0 if none waits. trainings: since the start.
    num_encoded_patches, encode_s: work of the vision tower (see `VisionInput.num_patches`), and its duration.
    saved_s, measured_saved_s: what merged weights saved against unmerged steps, switches deducted; as predicted at each
    decision, and corrected by the measured times.
    num_adapter_loads: adapter loads to the device. num_load_waits, load_wait_s: steps in which every request waited for
    an adapter to be read or loaded, and the total wait. num_threads: threads that compute a step, on each rank.
    max_context: tokens of a request, prompt and answer together. arena_basis: how arena_bytes was determined.
    atmm_table: the table that selects kernels; empty without an engine.
    num_base_clients to base_s: clients of the base model, and calls, rows and time of its products for them.
    cpu_kernels: "compiled", or "plain torch" without a working C++ compiler; empty on a GPU.
    """

    model: str
    num_steps: int
    steps_by_mode: dict[str, int]
    requests_by_mode: dict[str, int]
    num_switches: int
    switch_s: float
    num_waiting: int
    num_running: int
    num_finished: int
    num_failed: int
    num_preemptions: int
    free_blocks: int
    total_blocks: int
    arena_bytes: int = 0
    kv_bytes: int = 0
    adapter_bytes: int = 0
    num_adapters: int = 0
    num_resident_adapters: int = 0
    num_vision_hits: int = 0
    num_vision_encoded: int = 0
    vision_cache_bytes: int = 0
    num_cancelled: int = 0
    cached_blocks: int = 0
    cached_kv_bytes: int = 0
    num_computed_tokens: int = 0
    num_reused_tokens: int = 0
    num_step_tokens: int = 0
    num_needed_tokens: int = 0
    num_waiting_for_kv: int = 0
    host_adapter_bytes: int = 0
    relocated_bytes: int = 0
    num_adapter_loads: int = 0
    num_load_waits: int = 0
    load_wait_s: float = 0.0
    num_restarts: int = 0
    num_adapter_hits: int = 0
    num_adapter_misses: int = 0
    highest_credit_s: float = 0.0
    max_context: int = 0
    arena_basis: str = ""
    atmm_table: str = ""
    cpu_kernels: str = ""
    num_threads: int = 1
    num_encoded_patches: float = 0.0
    encode_s: float = 0.0
    saved_s: float = 0.0
    measured_saved_s: float = 0.0
    trainings: tuple[TrainingStatus, ...] = ()
    num_base_clients: int = 0
    num_base_calls: int = 0
    num_base_rows: int = 0
    base_s: float = 0.0
