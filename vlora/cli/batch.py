"""Commands that send many requests to a running server, or query its state."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.cli.extras import require
from vlora.cli.group import cli
from vlora.cli.interrupt import INTERRUPTED, stopping, until_stopped
from vlora.cli.options import (
    ADAPTER,
    ANSWER,
    ANSWER_TOKENS,
    FILE,
    FOLDER,
    HEAD,
    WAIT,
    check_given_once,
    command,
    flag,
    given,
    print_json,
    say,
)
from vlora.cli.progress import counting
from vlora.errors import BadConfig, BadImage, BadRequest
from vlora.run_folder import append, whole_lines, write_whole, writing
from vlora.types.domain import Way

if TYPE_CHECKING:
    from apps.image_query import PictureAnswer
    from apps.video_analytics import ChunkResult
    from apps.video_analytics.sink_plan import EventResult
    from vlora.client import Client

_PLAN_SUFFIXES = (".yaml", ".yml")
_IN_THE_PLAN = dict(
    adapters="--adapter", heads="--head", questions="--question", fps="--fps", max_tokens="--max-tokens"
)


@command(cli, needs="video")
@click.argument("sources", nargs=-1, required=True)
def stream(
    sources: tuple[str, ...],
    adapters: tuple[str, ...] = flag((), "Adapter of the heads and questions; may be repeated.", "-a", "--adapter"),
    heads: tuple[str, ...] = flag((), "Task head that answers: HEAD or ADAPTER/HEAD; may be repeated.", "--head"),
    questions: tuple[str, ...] = flag(
        (),
        "Question about one frame of each clip, which every --adapter answers in words (default: the base model); may "
        "be repeated.",
        "-q",
        "--question",
    ),
    max_tokens: int = flag(64, "Maximum number of tokens of a text."),
    fps: float | None = flag(
        None,
        "Frames per second of a clip; a clip has as many frames as its head reads. Default: one clip per second.",
        above=0,
    ),
    out: Path | None = flag(
        None,
        "Folder for NAME.jsonl, NAME.csv and NAME.webm (with several heads NAME.HEAD.*, with several adapters "
        "NAME.ADAPTER-HEAD.*); existing files are replaced.",
        "-o",
        type=FOLDER,
    ),
    max_latency_s: float | None = flag(None, "Maximum latency of an answer. Default: no bound."),
    check: bool = flag(False, "Of a plan: validate it without a server, and print what it asks per second."),
    wait_s: float = WAIT,
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Query task heads, or ask questions, about videos and cameras, many at once, clip by clip.

    \b
        vlora stream street.mp4 --adapter traffic --head jam
        vlora stream street.mp4 --adapter traffic --head jam --head cars --fps 4
        vlora stream rtsp://camera-7/main 0 videos/ --adapter traffic --head jam --out results
        vlora stream 0 --head traffic/jam --head parking/cars --question "what is on the road?"
        vlora stream plan.yaml --check
        vlora stream plan.yaml --out results

    A source is a file, a camera number, a URL, or a folder of videos and images, with the folders inside (without the
    results of an earlier run); all heads and questions read the same source, and those that read the same number of
    frames share each frame's transfer and vision encoding. A source that ends in .yaml is a plan: cameras with their
    own tasks and rates, tracked objects, and events that ask questions (docs/guide.md). A lost camera or server is
    retried; at startup, for --wait-s. Ctrl-C completes the clips in
    progress and closes the files. A clip that fails is reported and the command continues; the exit code is then 1.
    """
    common: dict[str, Any] = {"out": out, "max_latency_s": max_latency_s, "wait_s": wait_s, "say": say}
    if any(source.lower().endswith(_PLAN_SUFFIXES) for source in sources):
        _stream_plan(client, sources, check, as_json, common)
        return
    if check:
        raise BadRequest("--check is for a plan; give a .yaml file, or remove --check")
    from apps.video_analytics import find_sources, run

    check_given_once({"--head": heads, "--adapter": adapters, "--question": questions})
    if not heads and not questions:
        raise BadRequest("nothing is asked; give at least one --head or --question")
    if fps is not None and not math.isfinite(fps):
        raise BadRequest(f"--fps is {fps}; it must be a number above 0")
    found = find_sources(sources, say)
    several = len(heads) + len(questions) * max(1, len(adapters)) > 1
    printer = _Printer(as_json, source=len(found) > 1, task=several)
    with client, until_stopped() as stop:
        run(
            client,
            found,
            adapters,
            heads,
            questions=questions,
            max_tokens=max_tokens,
            fps=fps,
            stop=stop,
            on_result=printer.result,
            **common,
        )
    if printer.num_problems:
        sys.exit(1)


@command(cli)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
def batch(
    images: tuple[Path, ...],
    question: str | None = flag(None, "Question about each image. Default: that of the domain or the head.", "-q"),
    adapter: str | None = ADAPTER,
    head: str | None = HEAD,
    answer: Way | None = ANSWER,
    max_tokens: int = ANSWER_TOKENS,
    out: Path | None = flag(
        None,
        "File for the answers, as JSON lines; an existing file is replaced at the first answer.",
        "-o",
        type=FILE,
    ),
    resume: bool = flag(False, "Keep the answers in --out to the same question; ask about the others."),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Ask the same question about many images, or folders of images.

    \b
        vlora batch photos/ --question "What is this?" --out answers.jsonl
        vlora batch photos/ --question "What is this?" --out answers.jsonl --resume
        vlora batch photos/ --adapter signs --json

    As in `vlora query`, a domain's question is answered by its head or in words, and each answer says which.
    An image or a folder inside that fails is reported and the command continues; the exit code is then 1. The last line
    on stderr is a summary.
    """
    from apps.image_query import ask_all, find_pictures, printable

    num_problems = 0

    def on_error(error: BadImage) -> None:
        nonlocal num_problems
        num_problems += 1
        click.echo(str(error), err=True)

    if resume and out is None:
        raise click.UsageError("--resume continues a file; also give --out")
    found = find_pictures(images, on_error, say)
    num_found, num_received, num_answered = len(found), 0, 0
    if head is not None and answer is not None:
        raise BadRequest("--answer has no effect on a task head's answer; leave out --answer or --head")
    sampling: dict[str, Any] = {} if head is not None else {"max_tokens": max_tokens, "answer": answer}
    with contextlib.ExitStack() as scope:
        scope.enter_context(client)
        stop = scope.enter_context(stopping())
        file = None if out is None else AnswerFile(out)
        if file is not None and resume:
            answered = file.keep(question, adapter, head)
            found = [picture for picture in found if printable(picture) not in answered]
        advance = scope.enter_context(counting("pictures", len(found)))
        for each in ask_all(client, found, question=question, adapter=adapter, head=head, stop=stop, **sampling):
            advance()
            num_problems += each.problem is not None
            num_received += 1
            num_answered += each.problem is None
            if file is not None:
                file.add(each)
            if as_json:
                print_json(each)
            elif each.problem is not None:
                click.echo(f"{each.image}  {each.problem}", err=True)
            elif file is None:
                click.echo(f"{each.image}  {each.text}")
        if file is not None:
            file.write()
        kept = f", {num_found - len(found)} answered before" if resume else ""
        left = len(found) - num_received
        not_asked = f", {left} not asked" * (left > 0)
        click.echo(f"{num_found} pictures: {num_answered} answered{kept}, {num_problems} failed{not_asked}", err=True)
        if stop.is_set():
            sys.exit(INTERRUPTED)
    if num_problems:
        sys.exit(1)


class AnswerFile:
    """A file of answers as JSON lines, each written at once.

    It replaces an existing file at the first answer without a problem, so that a command that cannot ask, because of
    its arguments or the server, leaves the former answers; or it continues one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = False
        self._lines = b""

    def add(self, answer: PictureAnswer) -> None:
        import msgspec

        self._lines += msgspec.json.encode(answer) + b"\n"
        if self._begun or answer.problem is None:
            self.write()

    def keep(self, question: str | None, adapter: str | None, head: str | None) -> set[str]:
        """Continue an existing file with its answers, without failures and a line that was cut. Returns their images.

        Raises:
            BadConfig: The file has other lines, or answers to another question.
        """
        import msgspec

        from apps.image_query import PictureAnswer

        kept: dict[str, bytes] = {}
        for number, line in enumerate(whole_lines(self._path), 1):
            try:
                one = msgspec.json.decode(line, type=PictureAnswer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BadConfig(f"{self._path}, line {number}: no answer of `vlora batch` ({error})") from error
            if (one.question, one.adapter, one.head) != (question, adapter, head):
                raise BadConfig(f"{self._path}, line {number}: an answer to another question, adapter or head")
            if one.problem is None:
                kept[one.image] = line + b"\n"
        with writing(self._path):
            if kept:
                write_whole(self._path, b"".join(kept.values()), durable=False)
                self._begun = True
        return {*kept}

    def write(self) -> None:
        """Write the lines added so far. Raises NotWritten or BadConfig."""
        with writing(self._path):
            if self._lines and not self._begun:
                self._path.open("wb").close()
                self._begun = True
            if self._lines:
                append(self._path, self._lines, durable=False)
                self._lines = b""


def result_line(result: ChunkResult, *, source: bool, task: bool) -> str:
    """A result as one line. source, task: whether to show their names, which may differ only at their ends."""
    name = (f"{result.source:<20} " if source else "") + (f"{result.task:<12} " if task else "")
    confidence = f"{result.confidence:6.1%}" if result.answer is not None else " " * 6
    label = " ".join(result.label.split())  # a text may have several lines
    outcome = f"{label:<20} {confidence}" if result.problem is None else result.problem
    return f"{name}{result.start_s:7.1f} s  {outcome}  {result.latency_s * 1e3:6.0f} ms"


def _stream_plan(client: Client, sources: Sequence[str], check: bool, as_json: bool, common: dict[str, Any]) -> None:
    """Run a plan, or check it. common: arguments of `run_plan`.

    Raises:
        BadPlan: the plan cannot be run.
        BadRequest: options are given that the plan contains, or sources beside the plan.
    """
    require("plans")
    from apps.video_analytics.plan.plan_file import check_sources, read_plan
    from apps.video_analytics.plan.run_plan import lines, summarize

    if len(sources) > 1:
        raise BadRequest("a plan has its own cameras; give one plan and no other source")
    for name in filter(given, _IN_THE_PLAN):
        raise BadRequest(f"{_IN_THE_PLAN[name]} is for sources without a plan; write it into the plan")
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

    printer = _Printer(as_json, source=True, task=True)
    with client, until_stopped() as stop:
        run_plan(
            client,
            file,
            stop=stop,
            on_result=printer.result,
            on_event=printer.event,
            **common,
        )
    if printer.num_problems:
        sys.exit(1)


class _Printer:
    """Prints results and events, which come from several threads, one line at a time. fields: see `result_line`."""

    def __init__(self, as_json: bool, **fields: bool) -> None:
        self.num_problems = 0
        self._as_json, self._fields = as_json, fields
        self._lock = threading.Lock()

    def result(self, result: ChunkResult) -> None:
        with self._lock:
            self.num_problems += result.problem is not None
            if self._as_json:
                print_json(result)
            else:
                click.echo(result_line(result, **self._fields))

    def event(self, event: EventResult) -> None:
        with self._lock:
            self.num_problems += event.problem is not None
            if self._as_json:
                print_json(event)
                return
            thing = f"{event.label} {event.track}" if event.track is not None else event.label
            text = event.problem or ("" if event.text is None else " ".join(event.text.text.split()))
            text = "not verified" if event.verified is False else text
            answer = f": {text}" if text else ""
            click.echo(f"{event.source:<20} event {event.event:<18} {event.start_s:7.1f} s  {thing}{answer}")
