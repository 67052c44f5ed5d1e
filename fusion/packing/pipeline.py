"""From a plan to its packing: thresholds, candidate orders, the algorithm, and the oracle's result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fusion.packing.algorithm import Adapter, Packing, Train, pack, pack_best, pack_in_sequence
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import MOST_DOMAINS, Bound, Optimum, Oracle
from fusion.packing.orders import at_random, by_similarity, hardest_first
from fusion.plan.schema import Order, Plan, RelativeThreshold
from fusion.teachers.labelling import threshold_before_training
from fusion.training.checkpoint import State
from fusion.training.parallel_jobs import Ahead
from fusion.training.run_cache import Trainings
from fusion.training.train import Domain


@dataclasses.dataclass(frozen=True)
class Verdict:
    """bound: lower bound on the number of adapters. optimum: None if there are too many domains to try exhaustively."""

    bound: Bound
    optimum: Optimum | None


def thresholds_of(
    plan: Plan, train: Train, teachers: Mapping[str, float], say: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """The threshold of each domain, fixed before packing.

    A relative threshold is the validation score of the domain's teacher, or of an adapter for the domain alone, minus
    `minus`.

    Args:
        teachers: validation score of each domain's teacher.
        say: called with a warning for each threshold of 0, which every adapter meets.
    """
    thresholds = {}
    for domain in plan.domains:
        name, wanted = domain.name, domain.threshold
        known = threshold_before_training(domain, teachers.get(name))
        if known is None:
            assert isinstance(wanted, RelativeThreshold) and wanted.relative_to == "alone", "the check ensures it"
            alone = train((name,)).scores[name].value
            known = max(0.0, alone - wanted.minus)
            if known == 0:
                say(
                    f"{name} reaches {alone:.3f} alone; minus {wanted.minus:g}, its threshold is 0, which every "
                    "adapter meets; train it longer, or set a smaller `minus` or an absolute threshold"
                )
        thresholds[name] = known
    return thresholds


def orders_of(plan: Plan, domains: Mapping[str, Domain], train: Train) -> list[tuple[str, ...]]:
    """The plan's candidate orders. Each further `random` is another random order."""

    def order_of(order: Order, place: int) -> tuple[str, ...]:
        match order:
            case "given":
                return tuple(domains)
            case "random":
                return at_random(tuple(domains), plan.seed + place)
            case "similarity":
                return by_similarity({name: domain.features() for name, domain in domains.items()})
            case "hardest_first":
                return hardest_first({name: train((name,)).scores[name].value for name in domains})

    return [order_of(order, place) for place, order in enumerate(plan.order)]


def packing_of(
    plan: Plan,
    domains: Mapping[str, Domain],
    thresholds: Mapping[str, float],
    trainings: Trainings,
    say: Callable[[str], None],
    ahead: Ahead = lambda jobs: None,
) -> Packing:
    """Pack the domains as the plan says.

    Args:
        ahead: may run the trainings of several candidate orders, or of both parts of a split set, in parallel. Losing
            orders are then not abandoned early.
    """
    if plan.packing == "jointly":

        def both(parts: Sequence[frozenset[str]]) -> None:
            ahead([partial(trainings.together, part) for part in parts])

        return pack_jointly(tuple(domains), thresholds, trainings.together, say=say, ahead=both)
    orders = list(dict.fromkeys(orders_of(plan, domains, trainings)))
    if len(orders) > 1:
        one = pack if plan.packing == "first_fit" else pack_in_sequence
        ahead([partial(one, order, thresholds, trainings) for order in orders])
    if plan.packing == "first_fit":
        return pack_best(orders, thresholds, trainings, say=say)
    found = [pack_in_sequence(order, thresholds, trainings, say=say) for order in orders]
    return min(found, key=lambda packing: packing.rank)


def surely_alone(plan: Plan, teachers: Mapping[str, float]) -> tuple[str, ...]:
    """Domains that are trained alone in any case: for their thresholds, or for the order."""
    every = "hardest_first" in plan.order
    return tuple(
        domain.name
        for domain in plan.domains
        if every or threshold_before_training(domain, teachers.get(domain.name)) is None
    )


def fewest_trainings(plan: Plan, alone: Sequence[str]) -> int:
    """Minimum number of single-domain trainings of a run, if every domain fits where it is tried first.

    A joint training counts once per domain. alone: domains that are trained alone in any case.
    """
    orders = 1 if plan.packing == "jointly" else len(plan.order)
    again = plan.packing != "jointly" and plan.domains[0].name in alone  # the first domain starts alone in its adapter
    return len(alone) + orders * len(plan.domains) - (1 if again else 0)


def most_trainings(plan: Plan) -> int:
    """Maximum number of single-domain trainings of a run.

    Every domain is trained alone, and also: into the last adapter (naive); into each adapter that earlier domains
    created (first fit); or all jointly, then one fewer each time, and every pair of the remaining sets (jointly).
    """
    number = len(plan.domains)
    pairs = number * (number - 1) // 2
    beside_others = {
        "naive": (number - 1) * len(plan.order),
        "first_fit": pairs * len(plan.order),
        "jointly": pairs + number + pairs * number,
    }
    return number + beside_others[plan.packing]


def state_of(plan: Plan, adapter: Adapter, trainings: Trainings) -> State:
    """Weights of an adapter in the plan's packing."""
    return trainings.state_together(adapter) if plan.packing == "jointly" else trainings.state(adapter)


def verdict_of(thresholds: Mapping[str, float], trainings: Trainings) -> Verdict:
    """Run the oracle: it trains every domain and every pair jointly, and up to every set for at most six domains."""
    oracle = Oracle(tuple(thresholds), thresholds, trainings.together)
    bound = oracle.bound()
    few = len(thresholds) - len(bound.missed) <= MOST_DOMAINS
    return Verdict(bound, oracle.optimum() if few else None)
