"""Phase 5: the domains are packed into adapters, in the plan's candidate orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from fusion.packing.algorithm import Adapter, History, Packing, Step, Train, pack, pack_best, pack_in_sequence
from fusion.packing.guided import Former, pack_guided
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import Bound, Optimum, Oracle
from fusion.packing.orders import at_random, by_similarity, hardest_first
from fusion.packing.training_counts import trained_alone
from fusion.phases.data_ready import DataReady
from fusion.phases.session import Session
from fusion.phases.thresholds import Thresholds
from fusion.plan.schema import Order, Plan
from fusion.training.checkpoint import NotStored
from fusion.training.domain import Domain
from fusion.training.parallel_jobs import RunAhead
from fusion.training.run_cache import RunCache


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """bound: lower bound on the number of adapters. optimum: None if there are too many domains to try exhaustively."""

    bound: Bound
    optimum: Optimum | None


class _Stored(NamedTuple):
    """A packing as it is stored for later runs of a changed plan. identities: by the names in it."""

    adapters: list[tuple[Adapter, History]]
    steps: list[Step]
    identities: dict[str, str]

    def in_names_of(self, present: Mapping[str, str]) -> _Stored:
        """With the names of a changed plan, whose identities are given by name: also of renamed and of changed domains.
        A removed domain keeps its identity as its name."""
        here = {identity: name for name, identity in present.items()}
        names = {name: here.get(identity, "") for name, identity in self.identities.items()}
        free = present.keys() - names.values()
        names = {name: new or (name if name in free else self.identities[name]) for name, new in names.items()}
        return msgspec.convert(_renamed(msgspec.to_builtins(self), names), _Stored)


def pack_domains(data: DataReady, thresholds: Thresholds, session: Session) -> Packing:
    """Pack the domains as the plan says.

    After an earlier run with another plan, `guided` begins with that run's adapters, unless stored trainings suffice
    to pack from the beginning.
    """
    plan, cache, say = data.plan, session.cache, session.progress.say
    pack = partial(packing_of, plan, data.domains, thresholds.values, cache)
    alone = trained_alone(plan, data.teacher_scores)
    stored = session.checkpoint.packing(_Stored) if plan.packing == "guided" else None
    if stored is None:
        return pack(say, session.run_ahead, alone)
    said: list[str] = []
    try:
        with cache.only_stored():
            packing = pack(said.append, alone=alone)
    except NotStored:
        stored = stored.in_names_of(data.inputs.identities)
        former = _former(stored, tuple(data.domains), session)
        if all(one.trained is None for one in former):
            return pack(say, session.run_ahead, alone)
        return _continued(former, stored.steps, tuple(data.domains), thresholds, session, alone)
    for line in said:
        say(line)
    return packing


def keep_packing(packing: Packing, session: Session) -> None:
    """Store a packing for later runs of a changed plan."""
    trained = [{*history.together, *(new for _, new in history.joins)} for history in packing.histories.values()]
    identities = {name: session.cache.identity(name) for name in sorted(set().union(*trained))}
    session.checkpoint.keep_packing(_Stored([*packing.histories.items()], [*packing.steps], identities))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """JSON with other strings, keys included."""
    if isinstance(value, dict):
        return {_renamed(key, names): _renamed(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def _former(stored: _Stored, domains: Adapter, session: Session) -> list[Former]:
    """The adapters of an earlier run that have domains of this one."""
    left = [(history, tuple(name for name in adapter if name in domains)) for adapter, history in stored.adapters]
    return [Former(history, names, session.cache.stored(history, names)) for history, names in left if names]


def _continued(
    former: Sequence[Former],
    steps: Sequence[Step],
    domains: Adapter,
    thresholds: Thresholds,
    session: Session,
    alone: Sequence[str],
) -> Packing:
    """The packing of an earlier run, changed where domains, data or thresholds have changed, after its steps."""
    packing = pack_guided(
        domains, thresholds.values, session.cache, trained_alone=alone, say=session.progress.say, former=former
    )
    kept = {name for one in former if one.trained is not None for name in one.names}
    before = [step for step in steps if kept.issuperset(step.trained.scores)]
    return dataclasses.replace(packing, steps=(*before, *packing.steps))


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
