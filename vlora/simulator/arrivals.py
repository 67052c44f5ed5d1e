"""Arrivals: requests as a workload or a trace generates them."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """One request. time_s: seconds from the start, nondecreasing within a workload. adapter None: the base model.

    answer_tokens 0: a task head answers in one pass over the prompt. max_ttft_s, priority, tenant: as of a request.
    images: the patches of each image (`VisionInput.num_patches`), 0 for one with cached embeddings; their tokens are
    included in the prompt's. prefix: arrivals with the same one begin with the same `prefix_tokens` tokens.
    """

    time_s: float
    adapter: str | None
    prompt_tokens: int
    answer_tokens: int
    max_ttft_s: float | None = None
    priority: int = 0
    tenant: str | None = None
    images: tuple[int, ...] = ()
    prefix: str | None = None
    prefix_tokens: int = 0


def adapter_name(number: int) -> str:
    """Adapters are numbered by popularity: adapter-0 is the hottest."""
    return f"adapter-{number}"


def tenant_name(number: int) -> str:
    """Tenants are numbered by demand: tenant-0 has the most requests."""
    return f"tenant-{number}"
