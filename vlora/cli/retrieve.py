"""Recordings: `index` describes videos and pictures, `retrieve` searches them in words, `summarize` describes one."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from vlora.cli.group import cli
from vlora.cli.interrupt import until_stopped
from vlora.cli.options import FILE, check_given_once, command, flag, print_json, say, settings_of
from vlora.cli.progress import counting, waiting
from vlora.errors import BadRequest

if TYPE_CHECKING:
    import threading

    from apps.retrieval import Hit, IndexedClip, RetrievalIndex
    from vlora.client import Client
    from vlora.errors import VLoraError


@dataclasses.dataclass(frozen=True)
class _Description:
    """What an index has of its clips: arguments of `apps.retrieval.make_settings`."""

    adapters: tuple[str, ...] = flag((), "Adapter that describes the clips; may be repeated.", "-a", "--adapter")
    heads: tuple[str, ...] = flag((), "Task head that describes them: HEAD or ADAPTER/HEAD; repeatable.", "--head")
    questions: tuple[str, ...] = flag(
        (),
        "Question that every --adapter (default: the base model) answers in words about each clip; repeatable. "
        "Default, without --head: 'describe the image.', and all heads of the adapters.",
        "-q",
        "--question",
    )
    num_frames: int | None = flag(
        None, "Frames of a clip. Default: as many as the heads read at most, or 1.", "--frames", least=1, most=64
    )
    fps: float | None = flag(None, "Frames per second. Default: one clip per second.", above=0)
    max_tokens: int = flag(48, "Tokens of an answer.", least=1)
    max_side: int = flag(640, "Pixels of a stored frame's side.", least=16)


@command(cli, needs="video")
@click.argument("videos", nargs=-1, required=True)
def index(
    videos: tuple[str, ...],
    out: Path = flag(Path("index.sqlite"), "The index file; an existing index is updated.", "-o", type=FILE),
    settings: dict[str, Any] = settings_of(_Description),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Index videos, pictures, or folders of them, for `vlora retrieve`.

    \b
        vlora index videos/ --adapter traffic --out traffic.sqlite
        vlora index videos/ --adapter traffic --question "what is on the road?" --out traffic.sqlite

    Each clip is stored with its frames and with what heads and questions say about it. A second run reads new and
    changed files only, removes those that are gone, and continues after Ctrl-C. A file that cannot be read is reported,
    and the others are indexed; the exit code is then 1. If it is the only one given, the command ends with its error.
    """
    if settings["fps"] is not None and not math.isfinite(settings["fps"]):
        raise BadRequest(f"--fps is {settings['fps']}; it must be a number above 0")
    check_given_once({f"--{each}": settings[f"{each}s"] for each in ("head", "adapter", "question")})
    source_of = click.get_current_context().get_parameter_source
    named = [name for name in settings if source_of(name) is not ParameterSource.DEFAULT]
    with client, until_stopped() as stop, _open(client, out, settings, named) as opened:
        num_failed = _update(client, opened, videos, stop, as_json=as_json)
    if num_failed:
        sys.exit(1)


def _open(client: Client, path: Path, settings: dict[str, Any], named: Sequence[str]) -> RetrievalIndex:
    """The index of a file, which is created if it does not exist."""
    from apps.retrieval import RetrievalIndex, check_settings, make_settings

    wanted = make_settings(client, **settings)
    opened = RetrievalIndex(path, wanted)
    try:
        check_settings(opened, wanted, named)
    except BaseException:
        opened.close()
        raise
    return opened


def _update(
    client: Client,
    opened: RetrievalIndex,
    videos: Sequence[str],
    stop: threading.Event,
    *,
    as_json: bool = False,
) -> int:
    """Update the index. Returns the number of files that failed.

    Raises:
        VLoraError: The only file failed.
    """
    from apps.retrieval import update_index

    is_only_file = len(videos) == 1 and not os.path.isdir(videos[0])

    def on_failed(error: VLoraError) -> None:
        if is_only_file:
            raise error
        say(str(error))

    def on_clip(clip: IndexedClip) -> None:
        if as_json:
            print_json(clip)

    with waiting("indexing"):
        counts = update_index(
            client,
            opened,
            videos,
            stop=stop,
            on_clip=on_clip,
            on_failed=on_failed,
            say=say,
        )
    click.echo(
        f"{opened.path}: {counts.clips} clips added from {counts.read} files; {counts.unchanged} files unchanged, "
        f"{counts.removed} removed"
        + (f", {counts.failed} failed" if counts.failed else "")
        + ("; interrupted, run it again to continue" if stop.is_set() else ""),
        err=True,
    )
    return counts.failed


@command(cli, needs="video")
@click.argument("query", required=False)
@click.argument("videos", nargs=-1)
def retrieve(
    query: str | None,
    videos: tuple[str, ...],
    like: Path | None = flag(None, "Find clips like this picture, instead of QUERY."),
    path: Path = flag(Path("index.sqlite"), "The index file.", "-i", "--index", type=FILE),
    adapter: str | None = flag(None, "Adapter that ranks, or several: a+b. Default: the base model.", "-a"),
    question: str = flag(
        "Is there {}?",
        "Asked about each candidate; {} is the query. The probability of the answer yes counts in the score.",
        "-q",
    ),
    num_frames: int | None = flag(
        None,
        "Frames of a clip that the model reads. Default: as many as the adapter's heads read at most, or 1.",
        "--frames",
        least=1,
        most=64,
    ),
    candidates: int = flag(
        100, "Clips that the model reads, selected by the words and heads' answers of the index.", least=1
    ),
    top: int = flag(10, "Results to print.", least=1),
    sheet: Path | None = flag(None, "Contact sheet of the results to write, a PNG.", type=FILE),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Search videos and pictures in words: rank, score, file, time and reasons of the best clips.

    \b
        vlora retrieve "a white car turning left" videos/ --adapter traffic
        vlora retrieve "a red bus" --index traffic.sqlite --adapter traffic --sheet buses.png
        vlora retrieve --like photo.jpg --index traffic.sqlite

    With VIDEOS, the index is created or updated first, as `vlora index` does, and only they are searched; without, the
    whole index is. Words and heads' answers of the index select the candidates, which the model reads. The score from 0
    to 1 combines words, heads and the probability that the model answers yes; the output names what speaks for each
    clip. With --like, the score from -1 to 1 is the likeness of a clip's nearest frame to a picture by the base model's
    embeddings: copies of it, also cut or encoded again, come first.

    A file that cannot be read is reported, and the others are searched; the exit code is then 1. If it is the only one
    given, the command ends with its error.
    """
    from apps.retrieval import check_sheet, clips_inside, encoded_picture, search, search_like, write_sheet
    from vlora.client.inputs import question_about

    if like is not None:
        videos, query = (*filter(None, [query]), *videos), like.name
    query = query or ""
    question_about(query, question)
    if sheet is not None:
        check_sheet(sheet)
    num_failed = 0
    with client, until_stopped() as stop, _index_to_search(client, path, videos, adapter) as opened:
        if videos:
            num_failed = _update(client, opened, videos, stop)
        if not stop.is_set():
            common: dict[str, Any] = {"inside": videos, "top": top, "stop": stop}
            count = len(clips_inside(opened.clips(), videos))
            with counting("candidates", min(candidates, count) if like is None else count) as advance:
                if like is not None:
                    picture = encoded_picture(like, opened.settings.max_side)
                    hits = search_like(client, opened, picture, on_read=advance, **common)
                else:
                    common |= {"num_frames": num_frames, "num_candidates": candidates, "on_scored": advance}
                    hits = search(client, opened, query, adapter=adapter, question=question, **common)
            _print_hits(hits, as_json)
            if sheet is not None:
                write_sheet(sheet, query, hits, [opened.frames(hit.clip) for hit in hits])
    if num_failed:
        sys.exit(1)


def _index_to_search(client: Client, path: Path, videos: Sequence[str], adapter: str | None) -> RetrievalIndex:
    from apps.retrieval import RetrievalIndex, describing_adapters

    if not videos:
        return RetrievalIndex(path)
    opened = _open(client, path, {"adapters": () if adapter is None else (adapter,)}, ())
    describing = describing_adapters(opened.settings)
    if adapter is not None and adapter not in describing:
        described = ", ".join(sorted(describing)) or "the base model"
        click.echo(
            f"note: new clips are described by {described}, as the others in index {str(path)!r}; give another --index "
            f"for descriptions by {adapter}",
            err=True,
        )
    return opened


def _print_hits(hits: Sequence[Hit], as_json: bool) -> None:
    from apps.retrieval import clock

    if as_json:
        for hit in hits:
            print_json(hit)
        return
    width = max((len(Path(hit.source).name) for hit in hits), default=0)
    for hit in hits:
        time = clock(hit.start_s) if hit.seconds else ""
        name = Path(hit.source).name
        click.echo(f"{hit.rank:3}  {hit.score:.2f}  {name:<{width}}  {time:>9}  {hit.why()}".rstrip())


@command(cli, needs="video")
@click.argument("video")
def summarize(
    video: str,
    question: str | None = flag(None, "Question about each part. Default: what happens in it.", "-q"),
    summary_question: str | None = flag(
        None, "Question about the notes of all parts. Default: a summary in a few sentences."
    ),
    adapter: str | None = flag(None, "Adapter that answers about the parts. Default: the base model.", "-a"),
    part_s: float = flag(30.0, "Length of a part, in seconds."),
    num_frames: int = flag(8, "Frames of a part.", "--frames", least=1, most=256),
    max_tokens: int = flag(128, "Tokens of an answer.", least=1),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Describe a video part by part, with times, and then summarize these notes.

    \b
        vlora summarize day.mp4
        vlora summarize day.mp4 --part-s 60 --frames 16 --question "Who comes and goes?"

    The last line is the summary, by the base model. Notes that do not fit its context together are summarized by
    halves first.
    """
    from apps.retrieval import clock
    from apps.summary import summarize as notes_of

    if not 0.1 <= part_s < math.inf:
        raise BadRequest(f"--part-s is {part_s}; it must be a number, at least 0.1")
    asked: dict[str, Any] = {"question": question, "summary_question": summary_question, "adapter": adapter}
    asked = {name: value for name, value in asked.items() if value is not None}
    asked |= {"num_frames": num_frames, "max_tokens": max_tokens}
    with client, until_stopped() as stop, waiting("asking"):
        for note in notes_of(client, video, part_s=part_s, stop=stop, **asked):
            if as_json:
                print_json(note)
            else:
                name = "summary  " * (note.kind == "summary")
                click.echo(f"{name}{clock(note.start_s)} to {clock(note.end_s)}  {note.text}")
