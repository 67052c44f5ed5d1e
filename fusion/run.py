"""A run of `vlora fuse`: a plan in, adapters and a report out.

Its phases: the plan is checked, the base model is scored, each domain gets its threshold, the domains are packed into
adapters, and the adapters are tested and reported. Samples of a domain are encoded when they are first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console

from fusion.folder import ResumeHint, refuse_foreign, refuse_to_overwrite
from fusion.packing.algorithm import (
    Adapter,
    History,
    Packing,
    Step,
    Train,
    at_random,
    by_similarity,
    pack,
    pack_best,
    pack_in_sequence,
)
from fusion.packing.guided import Former, num_trainings, pack_guided, trained_alone
from fusion.packing.joint import Oracle, pack_jointly
from fusion.plan.check import check_plan
from fusion.plan.schema import Order, Plan, PlanFile, RelativeThreshold, read_plan_file
from fusion.progress import Progress, duration
from fusion.report.report import FusionReport, OracleReport
from vlora.errors import BadConfig
from vlora.run_folder import lock_folder, writing

if TYPE_CHECKING:
    from fusion.training.frozen_base import Domain
    from fusion.training.parallel_jobs import RunAhead
    from fusion.training.run_cache import RunCache
    from fusion.training.session import Session


def fuse(
    plan: PlanFile | Path | str,
    out: Path | str,
    *,
    device: str = "cpu",
    resume: bool = False,
    restart: bool = False,
    oracle: bool = False,
    workers: int = 1,
    console: Console | None = None,
    resume_hint: ResumeHint | None = None,
    replacing: Callable[[Path], AbstractContextManager[object]] = contextlib.nullcontext,
) -> FusionReport:
    """Run a plan file and write OUT/adapters/NAME/ (PEFT format with heads), OUT/test/, OUT/report.json and
    OUT/report.html, all at the end of the run. Deterministic for a seed, device and number of threads.

    Args:
        out: folder for the results and, during the run, for finished trainings.
        resume: reuse the trainings in OUT/checkpoint of an earlier run, also one with another plan, where everything
            that they depend on is the same.
        restart: delete these trainings and OUT/features, and replace the results of an earlier run.
        oracle: also find the minimum number of adapters, which takes many more trainings.
        workers: number of parallel trainings; CPU only.
        resume_hint: notified when an earlier run's trainings are deleted; from then on an interrupted run can be
            resumed.
        replacing: called with OUT/adapters before the block in which they replace those of an earlier run.

    Raises:
        BadPlan: the plan or its data cannot be used.
        BadConfig: OUT contains the work of an earlier run and neither `resume` nor `restart` is given, or files that
            no run wrote and this one would delete, or another process uses OUT.
    """
    if workers > 1 and not device.startswith("cpu"):
        raise BadConfig(f"workers is {workers}, but on {device} one process trains at a time; omit workers")
    if resume and restart:
        raise BadConfig("resume continues an earlier run and restart deletes it; give only one of the two")
    file, console, out = read_plan_file(plan), console or Console(), Path(out)
    if out.exists():
        with lock_folder(out):
            _check_folder(out, continues=resume or restart)
    hint = resume_hint or ResumeHint(out, restart=restart)
    with Progress(console) as progress, writing(out, only_disks=True):
        checked = check_plan(file, progress)
        from fusion.report.build import report_run  # errors in the plan need no torch
        from fusion.training.checkpoint import Checkpoint
        from fusion.training.session import prepare_data, score_base, training_session

        for name, own in checked.data.items():
            for note in own.notes:
                progress.say(f"{name}: {note}")
        with lock_folder(out):
            _check_folder(out, continues=resume or restart)  # another run may have used it since
            started = time.perf_counter()
            data = prepare_data(checked, out, progress, device=device)
            data.features.keep_only(() if restart else None)
            untrained = score_base(data, checked.text, Checkpoint(out / "checkpoint", resume=True) if resume else None)
            training = training_session(
                data, out, progress, resume=resume, untrained=untrained, workers=workers, on_cleared=hint.mark_cleared
            )
            with training as session:
                thresholds = set_thresholds(session)
                packing = pack_domains(session, thresholds)
                if data.plan.packing == "guided":
                    keep_packing(session, packing)
                optimum = find_optimum(session, thresholds) if oracle else None
            with replacing(out / "adapters"):
                report = report_run(session, untrained, thresholds, packing, optimum, out, started)
    console.print(report.table())
    if words := report.in_words():
        console.print(words, markup=False, highlight=False)
    return report


def preview(
    given: PlanFile | Path | str, out: Path | str, *, device: str = "cpu", console: Console | None = None
) -> None:
    """Print which trainings in OUT/checkpoint `fuse` with `resume` would reuse, those that it would run if each of them
    keeps every threshold, and their seconds: as earlier trainings took, else as estimated for the plan. Raises as
    `fuse` does.
    """
    out = Path(out)
    refuse_foreign(out)
    with Progress(console or Console()) as progress:
        checked = check_plan(read_plan_file(given), progress)
        from fusion.plan.estimate import estimate
        from fusion.training.fingerprint import ALL
        from fusion.training.frozen_base import load_frozen_base
        from fusion.training.session import prepare_data, training_session

        plan, alone = checked.plan, trained_alone(checked.plan, checked.teacher_scores)
        with lock_folder(out):
            data = prepare_data(checked, out, progress, device=device)
            with training_session(data, out, progress, resume=True) as session:
                quiet = dataclasses.replace(session, progress=Progress())
                with session.cache.supposing_success() as missing:
                    for name in alone:
                        session.cache((name,))
                    packing = None if missing else pack_domains(quiet, set_thresholds(quiet))
                packings = 2 if _former(session)[1] else 1  # again from the beginning
                each_s = session.checkpoint.seconds(data.inputs.training[ALL])
        if packing is not None and not missing:
            adapters = "; ".join(", ".join(adapter) for adapter in packing.adapters)
            progress.say(f"nothing to train: every training is stored; adapters: {adapters}")
            return
        if each_s is None:
            del data, session, quiet
            gc.collect()  # before the estimate's own copy of the base model is loaded
            each_s = estimate(plan, checked.data, load_frozen_base(plan, device, progress)).training_s
        for what, size in missing.items():
            progress.say(f"would run: {what}, about {duration(size * each_s)}")
        fits = "then packing" if packing is None else f"about {duration(sum(missing.values()) * each_s)} if each fits"
        most = packings * (num_trainings(plan, alone)[1] - len(alone)) + (len(missing) if packing is None else 0)
        progress.say(f"in all: {fits}, at most {duration(most * each_s)}")


def _check_folder(out: Path, *, continues: bool) -> None:
    refuse_foreign(out)
    if not continues:
        refuse_to_overwrite(out)


# -- thresholds -------------------------------------------------------------------------------------------------------


def set_thresholds(session: Session) -> dict[str, float]:
    """Set every threshold, after training those domains alone for which that is needed in any case."""
    data = session.data
    alone = trained_alone(data.plan, data.teacher_scores)
    session.progress.expect(num_trainings(data.plan, alone)[0])
    session.run_ahead({partial(session.cache, (name,)): (name,) for name in alone})
    counts = {name: len(domain.splits.validation) for name, domain in data.domains.items()}
    return thresholds_of(data.plan, session.cache, data.teacher_scores, counts, session.progress.say)


def thresholds_of(
    plan: Plan,
    train: Train,
    teacher_scores: Mapping[str, float],
    num_validation: Mapping[str, int],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """The value of each domain's threshold.

    A relative threshold is the validation score of the domain's teacher, or of an adapter for the domain alone, minus
    `minus`.

    Args:
        teacher_scores: validation score of each domain's teacher.
        say: called with a warning for each threshold of 0, which every adapter meets, and for each relative threshold
            that the domain misses even alone.
    """
    thresholds = {}
    for domain in plan.domains:
        name, wanted = domain.name, domain.threshold
        value = domain.threshold_before_training(teacher_scores.get(name))
        if value is None:
            assert isinstance(wanted, RelativeThreshold) and wanted.relative_to == "alone", "the check ensures it"
            alone = train((name,)).scores[name]
            value = max(0.0, alone.value - wanted.minus)
            if value == 0:
                say(
                    f"{name} reaches {alone.value:.3f} alone; minus {wanted.minus:g}, its threshold is 0, which every "
                    "adapter meets; train it longer, or set a smaller `minus` or an absolute threshold"
                )
            elif alone.lower < value:
                say(
                    f"{name} reaches {alone.value:.3f} alone and misses its threshold of {value:.3f} (minus "
                    f"{wanted.minus:g}), because the lower bound of {num_validation[name]} validation samples is "
                    f"{alone.lower:.3f}; add validation samples, or set a larger `minus`"
                )
        thresholds[name] = value
    return thresholds


# -- packing ----------------------------------------------------------------------------------------------------------


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


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """JSON with other strings, keys included."""
    if isinstance(value, dict):
        return {_renamed(key, names): _renamed(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def pack_domains(session: Session, thresholds: Mapping[str, float]) -> Packing:
    """Pack the domains as the plan says.

    After an earlier run with another plan, `guided` begins with that run's adapters. If it then needs more of them than
    before, or if stored trainings suffice, it packs from the beginning.
    """
    data, cache, say = session.data, session.cache, session.progress.say
    pack = partial(packing_of, data.plan, data.domains, thresholds, cache)
    alone = trained_alone(data.plan, data.teacher_scores)
    stored, former = _former(session)
    if not former:
        return pack(say, session.run_ahead, alone)
    with cache.supposing_success() as missing:
        packing = pack(lambda line: None, alone=alone)
    if not missing and _added(packing, stored) <= 0:
        return pack(say, session.run_ahead, alone)
    packing = pack_guided(tuple(data.domains), thresholds, cache, trained_alone=alone, say=say, former=former)
    kept = {name for one in former if one.trained is not None for name in one.names}
    steps = [step for step in stored.steps if kept.issuperset(step.trained.scores)]
    packing = dataclasses.replace(packing, steps=(*steps, *packing.steps))
    if (added := _added(packing, stored)) <= 0:
        return packing
    say(f"{len(packing.adapters)} adapters, {added} more than before: packing from the beginning, which may need fewer")
    return min(pack(say, session.run_ahead, alone), packing, key=lambda one: one.rank[:2])


def _former(session: Session) -> tuple[_Stored, list[Former]]:
    """The packing of an earlier run, and its adapters to begin with: none if all of their trainings changed."""
    data = session.data
    stored = session.checkpoint.packing(_Stored) if data.plan.packing == "guided" else None
    stored = (stored or _Stored([], [], {})).in_names_of(data.inputs.identities)
    left = [(history, tuple(name for name in old if name in data.domains)) for old, history in stored.adapters]
    former = [Former(history, names, session.cache.stored(history, names)) for history, names in left if names]
    return stored, former if any(one.trained for one in former) else []


def _added(packing: Packing, stored: _Stored) -> int:
    """How many more adapters a packing has than an earlier one, those of domains that miss their thresholds aside."""
    present = {name for adapter in packing.adapters for name in adapter}
    missed = {name for step in stored.steps if step.kept and not step.removed for name in step.broken}
    missed = missed - present | packing.missed.keys()  # of a domain that is present, the latest score counts
    before = sum(not missed.issuperset(old) for old, _ in stored.adapters)
    return len(packing.adapters) - len(packing.missed) - before


def keep_packing(session: Session, packing: Packing) -> None:
    trained = [{*history.together, *(new for _, new in history.joins)} for history in packing.histories.values()]
    identities = {name: session.cache.identity(name) for name in sorted(set().union(*trained))}
    session.checkpoint.keep_packing(_Stored([*packing.histories.items()], [*packing.steps], identities))


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
        run_ahead({partial(cache.together, part): part for part in parts})

    if plan.packing == "guided":
        return pack_guided(tuple(domains), thresholds, cache, trained_alone=alone, say=say, run_ahead=train_ahead)
    if plan.packing == "jointly":
        return pack_jointly(tuple(domains), thresholds, cache.together, say=say, run_ahead=train_ahead)
    orders = list(dict.fromkeys(orders_of(plan, domains, cache)))
    if len(orders) > 1:
        pack_one = pack if plan.packing == "first_fit" else pack_in_sequence
        run_ahead({partial(pack_one, order, thresholds, cache): order for order in orders})
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
                return tuple(sorted(domains, key=lambda name: train((name,)).scores[name].value))

    return [order_of(order, index) for index, order in enumerate(plan.order)]


def find_optimum(session: Session, thresholds: Mapping[str, float]) -> OracleReport:
    """Run the oracle: it trains every domain and every pair jointly, and up to every set for at most six domains."""
    oracle = Oracle(tuple(thresholds), thresholds, session.cache.together)
    bound, best = oracle.bound(), oracle.optimum()
    adapters = None if best is None else tuple(tuple(sorted(together)) for together in best)
    return OracleReport(bound.adapters, bound.missed, bound.conflicts, adapters)
