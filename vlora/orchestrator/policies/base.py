"""The interface of scheduling policies, which decide inference mode and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from vlora.orchestrator.cost_model import Costs
from vlora.types import Mode


class Candidate(NamedTuple):
    """A ready request (its adapter is resident) as seen by a policy.

    Attributes:
        request_id: the request.
        adapter: its adapter; None for the base model.
        credit: seconds, see `Scheduler`.
        new_tokens: tokens to compute before the next answer; 1 while decoding.
        cached_len: tokens with KV in place, which will be read.
        head: whether the next answer is the only one.
        urgent: starves because waiting theta would miss its deadline for the first answer.
        waited_s: seconds since it last ran, or entered the KV room.
        unanswered_s: seconds since its last answer, or since it entered.
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
    """Further inputs of a decision.

    Attributes:
        merged_adapter: the adapter merged into the weights now; None for W0.
        mergeable: resident adapters with sufficient merge fidelity.
        max_batch_size: requests per batch.
        theta_s: the credit in seconds above which a request starves.
        shadow_adapter: the adapter with merged weights available, in place or not; putting them in place is free. None
            where merged weights overwrite W0: then only the weights in place are available.
        max_step_tokens: the token budget that is applied to the decision afterwards.
        costs: learned costs of steps and merges.
        carried: `Decision.carried` of the previous decision; None at first.
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
    """The mode and the requests of a step.

    Attributes:
        mode: the inference mode.
        merged_adapter: None is W0, the merged form for base-model requests.
        order: request ids, most important first, at most max_batch_size; token and block budgets are applied
            afterwards.
        carried: passed to the next decision as `PolicyState.carried`. Policies that learn keep their state here.
    """

    mode: Mode
    merged_adapter: str | None
    order: tuple[str, ...]
    carried: Any = None


class Policy(Protocol):
    """A pure function of its arguments.

    Candidates are given in scheduling order (priority, fair share, arrival) and are never empty.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision: ...
