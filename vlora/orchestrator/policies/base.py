"""The rule that decides mode and order, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from vlora.orchestrator.cost_model import Costs
from vlora.types import Mode


class Candidate(NamedTuple):
    """A ready request (its adapter is resident) as a policy sees it.

    credit: seconds, see `Scheduler`. new_tokens: still to compute before its next answer; 1 while it decodes.
    cached_len: tokens whose KV is in place and will be read. head: whether the next answer is its only one.
    urgent: it starves because waiting theta would break its bound on the first answer. waited_s: seconds since it last
    ran, or entered the KV room. unanswered_s: seconds since its last answer, or since it entered.
    """

    request_id: str
    adapter: str | None
    credit: float
    new_tokens: int = 1
    cached_len: int = 0
    head: bool = False
    urgent: bool = False
    waited_s: float = 0.0
    unanswered_s: float = 0.0


class PolicyState(NamedTuple):
    """What else a decision may depend on.

    merged_adapter: whose delta is in the weights now, None for W0. mergeable: resident adapters whose merge fidelity
    holds.
    theta_s: the credit in seconds above which a request starves.
    shadow_adapter: whose merged weights are at hand, in place or not: putting them in place costs nothing.
    None where merged weights are written over W0: then only what is in place is at hand.
    max_step_tokens: the token budget that cuts the decision afterwards. costs: what steps and merges take, as learned.
    carried: what the policy's last decision handed on; None at first.
    """

    merged_adapter: str | None
    mergeable: frozenset[str]
    max_batch_size: int
    theta_s: float
    shadow_adapter: str | None = None
    max_step_tokens: int = 512
    costs: Costs = Costs()
    carried: Any = None


class Decision(NamedTuple):
    """order: the requests to run, most important first, at most max_batch_size; token and block budgets cut it last.

    merged_adapter None is W0, which is what base-model requests need: for them W0 is the merged form.
    carried: handed back in the next decision's `PolicyState`, for policies that learn: they hold no state themselves.
    """

    mode: Mode
    merged_adapter: str | None
    order: tuple[str, ...]
    carried: Any = None


class Policy(Protocol):
    """A pure function of its arguments. Candidates come in the order in which they get their turn (priority, fair
    share, arrival) and are never empty."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision: ...
