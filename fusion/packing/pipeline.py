"""From a plan to its packing: thresholds, candidate orders, the algorithm, and what an oracle would have found."""

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
    """bound: on the number of adapters. optimum: None for more domains than can be tried exhaustively."""

    bound: Bound
    optimum: Optimum | None


def thresholds_of(
    plan: Plan, train: Train, teachers: Mapping[str, float], say: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """What each domain must keep, fixed before anything is packed. Relative to a domain's teacher, whose validation
    scores are `teachers`; or to itself alone: its validation score in an adapter of its own, less `minus`.

    say: told of thresholds that come to nothing, which every adapter keeps.
    """
    thresholds = {}
    for domain in plan.domains:
        name, wanted = domain.name, domain.threshold
        known = threshold_before_training(domain, teachers.get(name))
        if known is None:
            assert isinstance(wanted, RelativeThreshold) and wanted.relative_to == "alone", "the plan's check saw to it"
            alone = train((name,)).scores[name].value
            known = max(0.0, alone - wanted.minus)
            if known == 0:
                say(
                    f"{name} reaches {alone:.3f} alone, and {wanted.minus:g} less is nothing: its promise is kept "
                    "whatever it learns; train it longer, or set a smaller `minus` or a threshold"
                )
        thresholds[name] = known
    return thresholds


def orders_of(plan: Plan, domains: Mapping[str, Domain], train: Train) -> list[tuple[str, ...]]:
    """The plan's candidate orders. `random` named several times is as many orders."""

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
    """ahead: may pack several candidate orders side by side, and train both parts of a set that was divided. An order
    that turns out to lose is then not given up early."""
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
    """Domains whose training alone will be asked for whatever comes of it: for their thresholds, or for the order."""
    every = "hardest_first" in plan.order
    return tuple(
        domain.name
        for domain in plan.domains
        if every or threshold_before_training(domain, teachers.get(domain.name)) is None
    )


def fewest_trainings(plan: Plan, alone: Sequence[str]) -> int:
    """Trainings of one domain that a run needs at least, of which one of several domains counts as many: every domain
    fits where it is tried first. alone: domains that are trained alone in any case."""
    orders = 1 if plan.packing == "jointly" else len(plan.order)
    again = plan.packing != "jointly" and plan.domains[0].name in alone  # the first one is alone in its adapter
    return len(alone) + orders * len(plan.domains) - (1 if again else 0)


def most_trainings(plan: Plan) -> int:
    """Trainings of one domain that a run needs at most: every domain alone, and into the last adapter (naive), or into
    each of those that the domains before it opened (first fit), or all at once and then one less each time, and any two
    of what is left united (jointly)."""
    number = len(plan.domains)
    pairs = number * (number - 1) // 2
    beside_others = {
        "naive": (number - 1) * len(plan.order),
        "first_fit": pairs * len(plan.order),
        "jointly": pairs + number + pairs * number,
    }
    return number + beside_others[plan.packing]


def state_of(plan: Plan, adapter: Adapter, trainings: Trainings) -> State:
    """Weights of an adapter of the plan's packing."""
    return trainings.state_together(adapter) if plan.packing == "jointly" else trainings.state(adapter)


def verdict_of(thresholds: Mapping[str, float], trainings: Trainings) -> Verdict:
    """Ask the oracle: trains every domain and pair together, and up to every set of up to six domains."""
    oracle = Oracle(tuple(thresholds), thresholds, trainings.together)
    bound = oracle.bound()
    few = len(thresholds) - len(bound.missed) <= MOST_DOMAINS
    return Verdict(bound, oracle.optimum() if few else None)
