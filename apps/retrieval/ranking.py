"""Ranks the clips of an index by VQAScore: the probability that the model answers "yes" if asked for the query.

VQAScore (Lin et al., https://arxiv.org/abs/2404.01291, section 3) is P("Yes" | image, question). The model reads only
the clips that the index's words select.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from apps.retrieval.indexing import CLIPS_AT_ONCE, check_model, check_versions
from apps.retrieval.store import RetrievalIndex, Statement, StoredClip
from apps.video_analytics.asked import by_name, find_groups, heads_of
from apps.video_analytics.sampling import spread
from vlora.client import Answer, Client
from vlora.errors import BadConfig, BadRequest
from vlora.types import MAX_LOGPROBS

QUESTION = "Is there {}?"
"""Asked about each candidate, with the query in the place of the braces."""
NUM_CANDIDATES = 100


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A clip and its score. score: P("yes"). matched: BM25 of its statements, 0 if no word of the query is in them."""

    rank: int
    source: str
    start_s: float
    seconds: float
    score: float
    matched: float
    statements: tuple[Statement, ...]
    clip: int


def search(
    client: Client,
    index: RetrievalIndex,
    query: str,
    *,
    adapter: str | None = None,
    question: str = QUESTION,
    num_frames: int | None = None,
    num_candidates: int = NUM_CANDIDATES,
    inside: Sequence[str | Path] = (),
    stop: threading.Event | None = None,
    on_scored: Callable[[], None] = lambda: None,
) -> list[Hit]:
    """Rank the clips of an index for a query, best first; clips that are no candidate are left out, and those that an
    update removes meanwhile.

    Args:
        adapter: that answers; None is the base model.
        question: with `{}` in the place of the query.
        num_frames: frames of a clip that the model reads; by default as many as the adapter's heads do at most, or 1,
            and no more than the index has.
        num_candidates: clips that the model reads; see `select_candidates`.
        inside: files, and folders of files, to search; empty is the whole index.
        stop: when set, no more clips are sent, and those already answered are ranked.

    Raises:
        BadRequest: the query is empty, or the question has no place for it.
        BadConfig: the index was made with another model or another version of an adapter, or contains no clip.
        UnknownAdapter: the server does not have the adapter.
    """
    asked = ask_for(query, question)
    check_model(client, index)
    if adapter is not None:
        find_groups(client, [adapter], [], [asked])
    check_versions(client, index)
    clips = clips_inside(index.clips(), inside)
    if not clips:
        raise BadConfig(
            f"index {str(index.path)!r} contains no clip{' of these files' if inside else ''}; index videos"
        )
    reads = num_frames or _frames_read(client, adapter, index.settings.num_frames)
    matched = index.match(query)
    scores = _scores(client, index, select_candidates(clips, matched, num_candidates), asked, adapter, reads, stop)
    scored: list[tuple[float, StoredClip]] = []
    for clip, score in scores:
        scored.append((score, clip))
        on_scored()
    # Equal scores keep the order of the candidates: words first, then time.
    ordered = sorted(scored, key=lambda each: -each[0])
    return [
        Hit(
            rank=rank,
            source=clip.path,
            start_s=clip.start_s,
            seconds=clip.seconds,
            score=score,
            matched=matched.get(clip.id, 0.0),
            statements=tuple(index.statements(clip.id)),
            clip=clip.id,
        )
        for rank, (score, clip) in enumerate(ordered, 1)
    ]


def ask_for(query: str, question: str) -> str:
    """The question about a query. Raises BadRequest."""
    if not query.strip():
        raise BadRequest("the query is empty; write what to look for, such as 'a white car turning left'")
    if question.count("{}") != 1:
        raise BadRequest(f"the question is {question!r}; write {{}} once, in the place of the query")
    return question.replace("{}", " ".join(query.split()))


def select_candidates(clips: Sequence[StoredClip], matched: dict[int, float], most: int) -> list[StoredClip]:
    """At most `most` clips: those that match the query's words, best first, then others evenly over all files."""
    found = sorted((clip for clip in clips if matched.get(clip.id)), key=lambda clip: -matched[clip.id])[:most]
    others = [clip for clip in clips if not matched.get(clip.id)]
    free = min(most - len(found), len(others))
    return found + ([others[place] for place in sorted(set(spread(free, len(others))))] if free else [])


def vqa_score(answer: Answer) -> float:
    """P("yes") of the first token, over its spellings among the most likely tokens; 0 if none of them is a "yes"."""
    if not answer.logprobs:
        return 0.0
    top = answer.logprobs[0].top
    return min(1.0, sum(math.exp(logprob) for token, logprob in top if token.strip().lower() == "yes"))


def _scores(
    client: Client,
    index: RetrievalIndex,
    clips: Sequence[StoredClip],
    asked: str,
    adapter: str | None,
    num_frames: int,
    stop: threading.Event | None,
) -> Iterator[tuple[StoredClip, float]]:
    def score(frames: Sequence[bytes]) -> float:
        answer = client.generate(asked, frames, adapter, max_tokens=1, min_tokens=1, logprobs=MAX_LOGPROBS)
        return vqa_score(answer)

    under_way: deque[tuple[StoredClip, Future[float]]] = deque()
    with ThreadPoolExecutor(CLIPS_AT_ONCE, thread_name_prefix="score") as threads:
        for clip in clips:
            if stop is not None and stop.is_set():
                break
            stored = index.frames(clip.id)
            if not stored:  # an update has removed the clip meanwhile
                continue
            frames = [stored[place] for place in spread(min(num_frames, len(stored)), len(stored))]
            under_way.append((clip, threads.submit(score, frames)))
            if len(under_way) >= CLIPS_AT_ONCE:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()


def _frames_read(client: Client, adapter: str | None, most: int) -> int:
    status = by_name(client.adapters()).get(adapter or "")
    own = [] if status is None or adapter is None else heads_of(status, adapter)
    frames = [head.num_frames for head in status.heads if head.name in own] if status is not None else []
    return min(most, max(frames, default=1))


def clips_inside(clips: Sequence[StoredClip], paths: Sequence[str | Path]) -> list[StoredClip]:
    """The clips of files, and of the files in folders, that `paths` name; without paths all."""
    if not paths:
        return list(clips)
    allowed = [Path(os.path.abspath(path)) for path in paths]
    return [clip for clip in clips if any(Path(clip.path).is_relative_to(path) for path in allowed)]
