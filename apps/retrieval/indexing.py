"""Builds an index, and updates it: new and changed files are read and described by heads and in words."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from apps.in_order import in_order
from apps.retrieval.media import Clip, Media, check_name, find_media, fingerprint, read_media
from apps.retrieval.store import IndexSettings, RetrievalIndex, Statement, check_settings
from apps.video_analytics import ClipShape
from apps.video_analytics.asked import Group, by_name, find_groups, heads_of
from vlora.client import Answer, Client, HeadResult
from vlora.errors import BadConfig, BadImage, PromptTooLong, TooLarge, VLoraError
from vlora.types import composed_of

QUESTION = "describe the image."
"""Asked of each clip if neither a head nor a question is given."""

_OF_ONE_FILE = (BadImage, TooLarge, PromptTooLong)  # other files may succeed


class IndexedClip(msgspec.Struct, frozen=True, kw_only=True):
    """A clip that was added to an index. source: its file. start_s: in the file."""

    source: str
    start_s: float
    statements: tuple[Statement, ...]


class IndexCounts(NamedTuple):
    """Results of an update. read: files that were read to their end. unchanged, removed, failed: further files."""

    clips: int
    read: int
    unchanged: int
    removed: int
    failed: int


def make_settings(
    client: Client,
    *,
    adapters: Sequence[str] = (),
    heads: Sequence[str] = (),
    questions: Sequence[str] = (),
    num_frames: int | None = None,
    fps: float | None = None,
    max_tokens: int = 48,
    max_side: int = 640,
) -> IndexSettings:
    """Settings of a new index.

    Args:
        adapters, heads, questions: see `find_groups`. Without heads and questions: all heads of the adapters, and
            QUESTION.
        num_frames: of a clip; by default as many as the heads read at most, or 1.

    Raises:
        UnknownAdapter, UnknownHead, BadRequest: see `find_groups`.
    """
    if not heads and not questions:
        known = by_name(client.adapters())
        heads = [f"{name}/{head}" for name in adapters if name in known for head in heads_of(known[name], name)]
        questions = [QUESTION]
    groups = find_groups(client, adapters, heads, questions, max_tokens)
    pairs = [f"{adapter}/{head}" for group in groups for adapter, head in group.heads]
    return IndexSettings(
        model=client.stats().model,
        num_frames=num_frames or max(group.shape.num_frames for group in groups),
        fps=fps,
        adapters=tuple(adapters),
        heads=tuple(pairs),
        questions=tuple(questions),
        max_tokens=max_tokens,
        max_side=max_side,
    )


def update_index(
    client: Client,
    index: RetrievalIndex,
    paths: Sequence[str | Path],
    *,
    stop: threading.Event | None = None,
    on_clip: Callable[[IndexedClip], None] = lambda clip: None,
    on_failed: Callable[[VLoraError], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> IndexCounts:
    """Add new files and files with changed content, and remove files of the given folders that no longer exist.

    Every clip is on the disk once it is described, so that a stopped update continues where it ended. A file that fails
    does not end the others. The index is locked against other updates meanwhile, and can be searched.

    Args:
        stop: when set, no more clips are read, and those sent are still answered.
        on_clip: called with each added clip. on_failed: called with the error of each file that fails, which is then
            not raised; what it raises ends the update. say: called with the other problems of files, and without
            `on_failed` with these errors too.

    Raises:
        BadImage: a path cannot be found or a folder contains no file, see `find_media`; nothing has been changed.
        BadConfig: the server has another model than the index or another version of an adapter, or another process
            updates the index.
        VLoraError: without `on_failed`, after all files, the first error of one; immediately, an error of the server.
    """
    stop, settings = stop or threading.Event(), index.settings
    report = on_failed or (lambda error: say(str(error)))
    with index.updating():
        check_model(client, index)
        groups = find_groups(client, settings.adapters, settings.heads, settings.questions, settings.max_tokens)
        check_versions(client, index)
        errors: list[VLoraError] = []
        media = find_media(paths, errors.append, say)
        removed = _vanished(index, paths)  # not of a folder without any file, which may be a disk that is not mounted
        index.remove(removed)
        for each in errors:
            report(each)
        counts = IndexCounts(0, 0, 0, len(removed), len(errors))
        for one in itertools.takewhile(lambda _: not stop.is_set(), media):
            try:
                added = _update(client, index, one, groups, stop, on_clip, say)
            except _OF_ONE_FILE as error:
                errors.append(error)
                counts = counts._replace(failed=len(errors))
                report(error)
                continue
            if added is None:
                counts = counts._replace(unchanged=counts.unchanged + 1)
            else:
                counts = counts._replace(clips=counts.clips + added, read=counts.read + 1)
    if errors and on_failed is None:
        raise errors[0]
    return counts


def check_model(client: Client, index: RetrievalIndex) -> None:
    """Raises BadConfig if the index was made with another model than the server's."""
    check_settings(index, msgspec.structs.replace(index.settings, model=client.stats().model), [])


def check_versions(client: Client, index: RetrievalIndex) -> None:
    """Record the versions of the adapters that answer for the index.

    Raises:
        BadConfig: the server has another version of one than the index.
    """
    owners = {part.adapter for name in describing_adapters(index.settings) for part in composed_of(name)}
    served = by_name(client.adapters())
    versions = {name: served[name].version for name in owners if name in served and served[name].version}
    known = index.versions
    for name, version in known.items():
        if (other := versions.get(name, version)) != version:
            raise BadConfig(
                f"index {str(index.path)!r} was made with version {version[:12]} of adapter {name!r}; the server has "
                f"{other[:12]}; give another index file, or delete this one"
            )
    if versions.keys() - known.keys():  # a search alone writes nothing
        index.add_versions(versions)


def describing_adapters(settings: IndexSettings) -> set[str]:
    """The adapters that describe the clips of an index, in words or by heads."""
    return {*settings.adapters, *(head.rpartition("/")[0] for head in settings.heads)}


def _vanished(index: RetrievalIndex, paths: Sequence[str | Path]) -> list[str]:
    folders = [Path(os.path.abspath(path)) for path in paths if os.path.isdir(path)]
    return [
        known
        for known in index.paths()
        if any(Path(known).is_relative_to(folder) for folder in folders) and _is_gone(known)
    ]


def _is_gone(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it may exist in a folder that cannot be read
        return False
    return False


def _update(
    client: Client,
    index: RetrievalIndex,
    media: Media,
    groups: Sequence[Group],
    stop: threading.Event,
    on_clip: Callable[[IndexedClip], None],
    say: Callable[[str], None],
) -> int | None:
    """Add a file's clips that the index does not have. Returns their number; None if the file has not changed."""
    check_name(media.path)
    known = index.find(media.path)
    now = fingerprint(media.path, None if known is None else known.fingerprint)
    identical = known is not None and known.fingerprint.digest == now.digest
    if known is not None and known.complete and identical and known.fingerprint == now:
        return None
    number = index.begin(media, now)
    if known is not None and known.complete and identical:
        return None  # only its time differs
    has = index.numbers(number)
    settings = index.settings
    shape = ClipShape(settings.num_frames, settings.fps)
    clips = (clip for clip in read_media(media, shape, settings.max_side, stop, say) if clip.number not in has)
    added = 0
    for clip, statements in in_order(lambda clip: describe(client, clip, groups), clips):
        if not added:
            check_versions(client, index)  # the first answer has loaded the adapters
        index.add(number, clip, statements)
        added += 1
        on_clip(IndexedClip(source=str(media.path), start_s=clip.start_s, statements=tuple(statements)))
    if not stop.is_set():
        index.complete(number)
    return added


def describe(client: Client, clip: Clip, groups: Sequence[Group]) -> list[Statement]:
    """Ask heads and questions about a clip. Questions read all of its frames. Raises the first error."""
    statements: list[Statement] = []
    for group in groups:
        if group.heads:
            outcomes = client.ask_heads(clip.pick(group.shape.num_frames), group.heads)
            for (adapter, head), outcome in zip(group.heads, outcomes, strict=True):
                if outcome.error is not None:
                    raise outcome.error.to_exception()
                assert outcome.answer is not None
                statements += statements_of_head(f"{adapter}/{head}", outcome.answer)
        for question in group.questions:
            answer = client.generate(
                question.question, clip.frames, question.adapter, max_tokens=question.max_tokens, logprobs=0
            )
            asked = question.question if question.adapter is None else f"{question.adapter}: {question.question}"
            statements.append(Statement(asked, answer.text.strip(), _confidence(answer)))
    return statements


def statements_of_head(asked: str, answer: HeadResult) -> list[Statement]:
    """A head's answer as words that can be searched.

    A detection gives a statement for each label, with the score of its best box; several labels one each; "yes" the
    head's name, and "no" nothing, because the words of a question must not find its denial.
    """
    match answer.task:
        case "detection":
            best: dict[str, float] = {}
            for box in answer.boxes:
                best[box.label] = max(best.get(box.label, 0.0), box.score)
            return [Statement(asked, label, score) for label, score in best.items()]
        case "multi_label":
            return [Statement(asked, answer.labels[label], answer.scores[label]) for label in answer.chosen]
        case "binary" if answer.label in ("yes", "no"):
            return [Statement(asked, answer.head, answer.confidence)] if answer.label == "yes" else []
        case "counting":
            return [Statement(asked, f"{answer.label} {answer.head}", answer.confidence)]
        case _:
            return [Statement(asked, answer.label, answer.confidence)]


def _confidence(answer: Answer) -> float:
    """The geometric mean of the tokens' probabilities."""
    if not answer.logprobs:
        return 0.0
    return math.exp(sum(token.logprob for token in answer.logprobs) / len(answer.logprobs))
