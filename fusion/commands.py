"""Entry points of `vlora fuse`: a plan in, adapters and a report out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from fusion.packing.training_counts import max_trainings, trained_alone
from fusion.phases.base_scored import score_base
from fusion.phases.data_ready import load_frozen_base, prepare_data
from fusion.phases.packing import find_optimum, keep_packing, pack_domains
from fusion.phases.plan_checked import check_plan
from fusion.phases.report import report_run
from fusion.phases.session import training_session
from fusion.phases.thresholds import set_thresholds
from fusion.plan.estimate import estimate
from fusion.plan.plan_file import PlanFile, read_plan_file
from fusion.plan.summary import as_json, print_summary
from fusion.progress.progress import Progress, duration
from fusion.report.examples import contact_sheet
from fusion.report.report import FusionReport
from fusion.report.results import refuse_foreign, refuse_to_overwrite
from fusion.training.fingerprint import ALL
from fusion.training.resume_hint import ResumeHint
from vlora.errors import BadConfig
from vlora.plan_files.run_lock import lock_folder
from vlora.writing import writing


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
        plan: the plan, or its file.
        out: folder for the results and, during the run, for finished trainings.
        device: training device.
        resume: reuse the trainings in OUT/checkpoint of an earlier run, also one with another plan, where everything
            that they depend on is the same.
        restart: delete these trainings and replace the results of an earlier run.
        oracle: also find the minimum number of adapters, which takes many more trainings.
        workers: number of parallel trainings; CPU only.
        console: output for progress and the report's table.
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
        for name, own in checked.data.items():
            for note in own.notes:
                progress.say(f"{name}: {note}")
        with lock_folder(out):
            _check_folder(out, continues=resume or restart)  # another run may have used it since
            started = time.perf_counter()
            data = prepare_data(checked, out, progress, device=device)
            base = score_base(data)
            with training_session(
                data, out, progress, resume=resume, workers=workers, on_cleared=hint.mark_cleared
            ) as session:
                thresholds = set_thresholds(data, session)
                packing = pack_domains(data, thresholds, session)
                keep_packing(packing, session)
                optimum = find_optimum(thresholds, session) if oracle else None
            with replacing(out / "adapters"):
                report = report_run(data, base, thresholds, packing, optimum, session, out, started)
    console.print(report.table())
    if words := report.in_words():
        console.print(words, markup=False, highlight=False)
    return report


def preview(
    given: PlanFile | Path | str, out: Path | str, *, device: str = "cpu", console: Console | None = None
) -> None:
    """Print which trainings in OUT/checkpoint `fuse` with `resume` would reuse, those that it would run if each of them
    keeps every threshold, and their seconds: as earlier trainings took, else as estimated for the plan.

    Raises:
        BadPlan: the plan or its data cannot be used.
        BadConfig: OUT contains files of others, or another process uses it.
    """
    out = Path(out)
    refuse_foreign(out)
    with Progress(console or Console()) as progress:
        checked = check_plan(read_plan_file(given), progress)
        plan, alone = checked.plan, trained_alone(checked.plan, checked.teacher_scores)
        with lock_folder(out):
            data = prepare_data(checked, out, progress, device=device, encode=False)
            session_of = functools.partial(training_session, resume=True, workers=1, on_cleared=lambda: None)
            with session_of(data, out, progress) as session:
                quiet = dataclasses.replace(session, progress=Progress())
                with session.cache.supposing_success() as missing:
                    for name in alone:
                        session.cache((name,))
                    packing = None if missing else pack_domains(data, set_thresholds(data, quiet), quiet)
                each_s = session.checkpoint.seconds(data.inputs.training[ALL])
        if packing is not None and not missing:
            adapters = "; ".join(", ".join(adapter) for adapter in packing.adapters)
            progress.say(f"nothing to train: every training is stored; adapters: {adapters}")
            return
        if each_s is None:
            each_s = estimate(plan, checked.data, load_frozen_base(plan, device, progress)).training_s
        for what, size in missing.items():
            progress.say(f"would run: {what}, about {duration(size * each_s)}")
        fits = "then packing" if packing is None else f"about {duration(sum(missing.values()) * each_s)} if each fits"
        most = max_trainings(plan, alone) - len(alone) + (len(missing) if packing is None else 0)
        progress.say(f"in all: {fits}, at most {duration(most * each_s)}")


def _check_folder(out: Path, *, continues: bool) -> None:
    refuse_foreign(out)
    if not continues:
        refuse_to_overwrite(out)


def explain(
    plan: PlanFile | Path | str,
    *,
    device: str = "cpu",
    json_out: bool = False,
    console: Console | None = None,
    sheet: Path | None = None,
) -> None:
    """Print what a plan file does, with estimates of time, memory and disk from a few measured steps.

    Args:
        plan: the plan, or its file.
        device: device for the measured steps.
        json_out: print one line of JSON.
        console: output; progress goes to stderr.
        sheet: PNG file for a contact sheet of the data, with labels and boxes.

    Raises:
        BadPlan: the plan or its data cannot be used; the message lists every error.
        BadConfig: the base model's weights or its processor cannot be loaded.
    """
    with Progress(Console(stderr=True)) as progress:
        checked = check_plan(read_plan_file(plan), progress)
        if sheet is not None:
            try:
                contact_sheet({name: data.splits for name, data in checked.data.items()}).save(sheet)
                progress.say(f"contact sheet of the data, with labels and boxes: {sheet}")
            except OSError as error:  # the check goes on
                progress.say(f"no contact sheet of the data: {sheet} cannot be written: {error.strerror}")
        estimated = estimate(checked.plan, checked.data, load_frozen_base(checked.plan, device, progress))
    console = console or Console()
    if json_out:
        console.out(as_json(checked, estimated), highlight=False)
    else:
        print_summary(checked, estimated, console)
