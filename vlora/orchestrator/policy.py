"""The rule that decides mode and order, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vlora.types import Mode


class Candidate(NamedTuple):
    """A ready request (its adapter is resident) as a policy sees it. credit: seconds, see `Scheduler`."""

    request_id: str
    adapter: str | None
    credit: float


class PolicyState(NamedTuple):
    """What else a decision may depend on.

    merged_adapter: whose delta is in the weights now, None for W0. mergeable: resident adapters whose merge fidelity
    holds.
    theta_s: the credit in seconds above which a request starves.
    """

    merged_adapter: str | None
    mergeable: frozenset[str]
    max_batch_size: int
    theta_s: float


class Decision(NamedTuple):
    """order: the requests to run, most important first, at most max_batch_size; token and block budgets cut it last.

    merged_adapter None is W0, which is what base-model requests need: for them W0 is the merged form.
    """

    mode: Mode
    merged_adapter: str | None
    order: tuple[str, ...]


class Policy(Protocol):
    """A pure function of its arguments. Candidates come in order of arrival and are never empty."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision: ...
