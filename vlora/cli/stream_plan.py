"""`vlora stream plan.yaml`, and how `vlora stream` prints a result."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from vlora.cli.extras import require
from vlora.cli.interrupt import until_stopped
from vlora.cli.server_flags import print_json
from vlora.errors import BadRequest

if TYPE_CHECKING:
    from apps.video_analytics import ChunkResult
    from apps.video_analytics.plan.event_questions import EventResult
    from vlora.client import Client

_PLAN_SUFFIXES = (".yaml", ".yml")
_IN_THE_PLAN = {"adapters": "--adapter", "heads": "--head", "questions": "--question", "fps": "--fps"}
_IN_THE_PLAN |= {"max_tokens": "--max-tokens"}


def is_plan(source: str) -> bool:
    return source.lower().endswith(_PLAN_SUFFIXES)


def result_line(result: ChunkResult, *, source: bool, task: bool) -> str:
    """A result as one line. source, task: whether to show their names, which may differ only at their ends."""
    name = (f"{result.source:<20} " if source else "") + (f"{result.task:<12} " if task else "")
    confidence = f"{result.confidence:6.1%}" if result.answer is not None else " " * 6
    label = " ".join(result.label.split())  # a text may have several lines
    outcome = f"{label:<20} {confidence}" if result.problem is None else result.problem
    return f"{name}{result.start_s:7.1f} s  {outcome}  {result.latency_s * 1e3:6.0f} ms"


def stream_plan(
    context: click.Context,
    sources: Sequence[str],
    out: Path | None,
    max_latency_s: float | None,
    check: bool,
    wait_s: float,
    client: Client,
    as_json: bool,
) -> None:
    """Run a plan, or check it. The arguments are those of `vlora stream`.

    Raises:
        BadPlan: the plan cannot be run.
        BadRequest: options are given that the plan contains, or sources beside the plan.
    """
    require("plans")
    from apps.video_analytics.plan.plan_file import check_sources, read_plan
    from apps.video_analytics.plan.run_plan import lines, summarize

    if len(sources) > 1:
        raise BadRequest("a plan has its own cameras; give one plan and no other source")
    for name, flag in _IN_THE_PLAN.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise BadRequest(f"{flag} is for sources without a plan; write it into the plan")
    file = read_plan(sources[0])
    if check:
        check_sources(file)
        summary = summarize(file.plan)
        if as_json:
            print_json(summary)
            return
        for line in lines(summary):
            click.echo(line)
        return
    from apps.video_analytics.plan.run_plan import run_plan

    printer = _Printer(as_json)
    with client, until_stopped() as stop:
        run_plan(
            client,
            file,
            out=out,
            max_latency_s=max_latency_s,
            wait_s=wait_s,
            stop=stop,
            on_result=printer.result,
            on_event=printer.event,
            say=lambda text: click.echo(text, err=True),
        )
    if printer.num_problems:
        sys.exit(1)


class _Printer:
    """Prints results and events, which come from several threads, one line at a time."""

    def __init__(self, as_json: bool) -> None:
        self.num_problems = 0
        self._as_json = as_json
        self._lock = threading.Lock()

    def result(self, result: ChunkResult) -> None:
        with self._lock:
            self.num_problems += result.problem is not None
            if self._as_json:
                print_json(result)
            else:
                click.echo(result_line(result, source=True, task=True))

    def event(self, event: EventResult) -> None:
        with self._lock:
            self.num_problems += event.problem is not None
            if self._as_json:
                print_json(event)
                return
            thing = f"{event.label} {event.track}" if event.track is not None else event.label
            text = event.problem or ("" if event.text is None else " ".join(event.text.text.split()))
            answer = f": {text}" if text else ""
            click.echo(f"{event.source:<20} event {event.event:<18} {event.start_s:7.1f} s  {thing}{answer}")
