"""Phase 5: the domains are packed into adapters, in the plan's candidate orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from fusion.packing.algorithm import Packing, Train, pack, pack_best, pack_in_sequence
from fusion.packing.guided import pack_guided
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import Bound, Optimum, Oracle
from fusion.packing.orders import at_random, by_similarity, hardest_first
from fusion.packing.training_counts import trained_alone
from fusion.phases.data_ready import DataReady
from fusion.phases.session import Session
from fusion.phases.thresholds import Thresholds
from fusion.plan.schema import Order, Plan
from fusion.training.domain import Domain
from fusion.training.parallel_jobs import RunAhead
from fusion.training.run_cache import RunCache


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """bound: lower bound on the number of adapters. optimum: None if there are too many domains to try exhaustively."""

    bound: Bound
    optimum: Optimum | None


def pack_domains(data: DataReady, thresholds: Thresholds, session: Session) -> Packing:
    """Pack the domains as the plan says."""
    return packing_of(
        data.plan,
        data.domains,
        thresholds.values,
        session.cache,
        session.progress.say,
        session.run_ahead,
        trained_alone(data.plan, data.teacher_scores),
    )


def packing_of(
    plan: Plan,
    domains: Mapping[str, Domain],
    thresholds: Mapping[str, float],
    cache: RunCache,
    say: Callable[[str], None],
    run_ahead: RunAhead = lambda jobs: None,
    alone: Sequence[str] = (),
) -> Packing:
    """Pack domains as a plan says.

    Args:
        run_ahead: may run the trainings of several candidate orders, of both halves that `guided` begins with, or of
            both parts of a set that `jointly` divides, in parallel. Losing orders are then not abandoned early.
        alone: domains that were trained alone for their thresholds.
    """

    def train_ahead(parts: Iterable[Collection[str]]) -> None:
        run_ahead([partial(cache.together, part) for part in parts])

    if plan.packing == "guided":
        return pack_guided(tuple(domains), thresholds, cache, trained_alone=alone, say=say, run_ahead=train_ahead)
    if plan.packing == "jointly":
        return pack_jointly(tuple(domains), thresholds, cache.together, say=say, run_ahead=train_ahead)
    orders = list(dict.fromkeys(orders_of(plan, domains, cache)))
    if len(orders) > 1:
        pack_one = pack if plan.packing == "first_fit" else pack_in_sequence
        run_ahead([partial(pack_one, order, thresholds, cache) for order in orders])
    if plan.packing == "first_fit":
        return pack_best(orders, thresholds, cache, say=say)
    found = [pack_in_sequence(order, thresholds, cache, say=say) for order in orders]
    return min(found, key=lambda packing: packing.rank)


def orders_of(plan: Plan, domains: Mapping[str, Domain], train: Train) -> list[tuple[str, ...]]:
    """The plan's candidate orders. Each further `random` is another random order."""

    def order_of(order: Order, index: int) -> tuple[str, ...]:
        match order:
            case "given":
                return tuple(domains)
            case "random":
                return at_random(tuple(domains), plan.seed + index)
            case "similarity":
                return by_similarity({name: domain.features() for name, domain in domains.items()})
            case "hardest_first":
                return hardest_first({name: train((name,)).scores[name].value for name in domains})

    return [order_of(order, index) for index, order in enumerate(plan.order)]


def find_optimum(thresholds: Thresholds, session: Session) -> OracleResult:
    """Run the oracle: it trains every domain and every pair jointly, and up to every set for at most six domains."""
    oracle = Oracle(tuple(thresholds.values), thresholds.values, session.cache.together)
    return OracleResult(oracle.bound(), oracle.optimum_of_few())
