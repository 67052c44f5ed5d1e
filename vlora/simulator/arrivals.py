"""What comes in: one request as a workload or a trace gives it."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """time_s: seconds from the start, never falling within a workload. adapter None: the base model.

    answer_tokens 0: a task head answers in one pass over the prompt. max_ttft_s, priority, tenant: as of a request.
    images: the patches of each image (`VisionInput.num_patches`), 0 for one whose embeddings are cached; their tokens
    are among those of the prompt.
    """

    time_s: float
    adapter: str | None
    prompt_tokens: int
    answer_tokens: int
    max_ttft_s: float | None = None
    priority: int = 0
    tenant: str | None = None
    images: tuple[int, ...] = ()


def adapter_name(number: int) -> str:
    """Adapters are known by their rank in popularity: adapter-0 is the hottest."""
    return f"adapter-{number}"


def tenant_name(number: int) -> str:
    """Tenants are known by how much they ask: tenant-0 asks most."""
    return f"tenant-{number}"
