"""The rule that decides mode and order, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vlora.errors import BadConfig
from vlora.types import Mode


class Candidate(NamedTuple):
    """A ready request as a policy sees it. credit: seconds, see `Scheduler`. Candidates come in order of arrival."""

    request_id: str
    adapter: str | None
    credit: float


class PolicyState(NamedTuple):
    """merged_adapter: whose delta is in the weights now. mergeable: adapters whose merge fidelity holds."""

    merged_adapter: str | None
    mergeable: frozenset[str]
    max_batch_size: int
    theta_s: float


class Decision(NamedTuple):
    """order: the requests to run, most important first, at most max_batch_size; budgets are cut later, from its end."""

    mode: Mode
    merged_adapter: str | None
    order: tuple[str, ...]


class Policy(Protocol):
    """Pure function of its arguments."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision: ...


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises BadConfig."""
    from vlora.orchestrator.algorithm1 import Algorithm1

    known: dict[str, Callable[[], Policy]] = {"vlora": Algorithm1}
    if name not in known:
        raise BadConfig(f"policy is {name!r}; known: {', '.join(sorted(known))}")
    return known[name]()
