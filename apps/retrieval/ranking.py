"""Ranks the clips of an index by what it says in words, by its heads' answers, and by VQAScore.

VQAScore (Lin et al., https://arxiv.org/abs/2404.01291, section 3) is P("Yes" | image, question). The model reads only
the clips that words and heads select.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from apps.in_order import in_order
from apps.retrieval.indexing import check_model, check_versions
from apps.retrieval.media import widened
from apps.retrieval.store import RetrievalIndex, Statement, StoredClip
from apps.video_analytics.asked import by_name, find_groups, heads_of
from apps.video_analytics.sampling import spread
from vlora.client import Client
from vlora.client.inputs import PICTURE_QUESTION, question_about
from vlora.errors import BadConfig

NUM_CANDIDATES = 100

_TO_TWELVE = "zero one two three four five six seven eight nine ten eleven twelve"
_FIGURES = {name: str(number) for number, name in enumerate(re.findall(r"\w+", _TO_TWELVE))}
_NAMES = {figures: name for name, figures in _FIGURES.items()}
_GRAMMAR = frozenset(re.findall(r"\w+", "a an and are at in is it of on or that the there to with"))
_DOUBTS = np.array([[0.05], [0.05], [0.0003]])  # of words, heads and the model; smaller differences hardly count
_CLEAR = 1 / 3  # value of words or heads above their mean, from which the model's answers count as far as they agree
_COMPARABLE = 10  # clips; correlations of fewer are mostly chance
_CONSTANT = 1e-9  # norm of the odds of a signal that does not differ between clips
_LONGEST_RUN = 3  # words
_MARGINS = (0.0, 0.06, 0.12)  # by which a picture's borders are continued, as shares of its sides


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of the index that speaks for a clip. words: those of the query that it contains."""

    by: Literal["words", "heads"]
    asked: str
    text: str
    confidence: float
    words: tuple[str, ...]


class Evidence(NamedTuple):
    """What the index says about a clip, from 0 to 1. words: the share of the query's terms in answers to questions,
    times their confidence, squared because half of a query is little evidence. heads: the same for answers of heads.
    """

    words: float
    heads: float
    matches: tuple[Match, ...]


NO_EVIDENCE = Evidence(0.0, 0.0, ())


def find_evidence(index: RetrievalIndex, query: str) -> dict[int, Evidence]:
    """The evidence of the index for a query, by clip.

    A term is a word, or two or three in a row: "a red car" differs from "a red bus and a blue car". It weighs the
    logarithm of all clips by those that have it; words of grammar count in rows only. Numbers match in words and
    figures. The name of a head whose answer matches is a part of the answer.
    """
    words = re.findall(r"\w+", query.lower())
    runs = [
        " ".join(words[first : first + length])
        for length in range(2, _LONGEST_RUN + 1)
        for first in range(len(words) - length + 1)
    ]
    single = list(dict.fromkeys(word for word in words if word not in _GRAMMAR)) or words
    found = {term: index.match(_spellings(term)) for term in dict.fromkeys([*single, *runs])}
    num_clips, heads = len(index.clips()), frozenset(index.settings.heads)
    counts = {term: len({clip for clip, _ in rows}) for term, rows in found.items()}
    weights = {
        term: math.log((num_clips + 1) / max(1, count)) for term, count in counts.items() if count or term in single
    }
    terms: dict[int, dict[Statement, list[str]]] = {}
    for term, rows in found.items():
        for clip, statement in rows:
            terms.setdefault(clip, {}).setdefault(statement, []).append(term)
    return {clip: _evidence(own, single, weights, heads) for clip, own in terms.items()}


def _evidence(
    terms: Mapping[Statement, Sequence[str]],
    single: Sequence[str],
    weights: Mapping[str, float],
    heads: Collection[str],
) -> Evidence:
    best: dict[str, dict[str, float]] = {"words": {}, "heads": {}}
    matches = []
    for statement, contained in terms.items():
        by: Literal["words", "heads"] = "heads" if statement.asked in heads else "words"
        if by == "heads":
            name = {_singular(word) for word in re.findall(r"[^\W_]+", statement.asked.rpartition("/")[2].lower())}
            contained = [word for word in single if word in contained or _singular(word) in name]
        for term in contained:
            best[by][term] = max(best[by].get(term, 0.0), statement.confidence)
        if said := tuple(word for word in single if word in contained):
            matches.append(Match(by=by, words=said, **statement._asdict()))
    only_single = {word: weights[word] for word in single}
    return Evidence(_share(best["words"], weights), _share(best["heads"], only_single), tuple(matches))


def _share(best: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return (sum(weights[term] * confidence for term, confidence in best.items()) / sum(weights.values())) ** 2


def _spellings(term: str) -> list[str]:
    """The term, with numbers in words and in figures."""
    words = term.split()
    return list(dict.fromkeys(" ".join(table.get(word, word) for word in words) for table in ({}, _NAMES, _FIGURES)))


def _singular(word: str) -> str:
    return word.removesuffix("s")


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A clip and its score, see `combine`. words, heads, matches: see `Evidence`. yes: the model's P("yes"); None if it
    has not read the clip.
    """

    rank: int
    source: str
    start_s: float
    seconds: float
    score: float
    words: float
    heads: float
    yes: float | None
    matches: tuple[Match, ...]
    statements: tuple[Statement, ...]
    clip: int

    def why(self, longest: int = 48) -> str:
        """What speaks for the clip, in one line; what describes it, if no statement does. longest: of a text."""
        reasons = [] if self.yes is None else [f"yes {self.yes:.2f}"]
        for match in sorted(self.matches, key=lambda match: (match.by, -len(match.words))):
            source = f"{match.asked.rpartition('/')[2]}: " if match.by == "heads" else ""
            reasons.append(f"{source}{_shortened(match.text, longest)} {match.confidence:.2f}")
        if not self.matches:
            reasons.append(f"({_shortened('; '.join(each.text for each in self.statements), longest)})")
        return "; ".join(reasons)


def _shortened(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def search(
    client: Client,
    index: RetrievalIndex,
    query: str,
    *,
    adapter: str | None = None,
    question: str = PICTURE_QUESTION,
    num_frames: int | None = None,
    num_candidates: int = NUM_CANDIDATES,
    inside: Sequence[str | Path] = (),
    top: int | None = None,
    stop: threading.Event | None = None,
    on_scored: Callable[[], None] = lambda: None,
) -> list[Hit]:
    """Rank the clips of an index for a query, best first, by words, heads and the model together (`combine`).

    The model reads the candidates. Other clips are ranked without it if words or heads speak for them, and left out
    otherwise, as are those that an update removes meanwhile.

    Args:
        adapter: that answers; None is the base model.
        question: with `{}` in the place of the query.
        num_frames: frames of a clip that the model reads; by default as many as the adapter's heads do at most, or 1,
            and no more than the index has.
        num_candidates: clips that the model reads, selected by words and heads; see `select_candidates`.
        inside: files, and folders of files, to search; empty is the whole index.
        top: the number of clips to return; None returns all.
        stop: when set, no more clips are sent, and those already answered are ranked.

    Raises:
        BadRequest: the query is empty, or the question has no place for it.
        BadConfig: the index was made with another model or another version of an adapter, or contains no clip.
        UnknownAdapter: the server does not have the adapter.
    """
    asked = question_about(query, question)
    check_model(client, index)
    if adapter is not None:
        find_groups(client, [adapter], [], [asked])
    check_versions(client, index)
    clips = _clips_to_search(index, inside)
    reads = num_frames or _frames_read(client, adapter, index.settings.num_frames)
    found = find_evidence(index, query)
    evidence = {clip.id: found.get(clip.id, NO_EVIDENCE) for clip in clips}
    words, heads = [each.words for each in evidence.values()], [each.heads for each in evidence.values()]
    cheap = combine(words, heads, [None] * len(clips))
    said = {clip.id: score for clip, score in zip(clips, cheap, strict=True) if found.get(clip.id)}
    yes: dict[int, float] = {}
    candidates = select_candidates(clips, said, num_candidates)
    for clip, probability in _scores(client, index, candidates, asked, adapter, reads, stop):
        yes[clip.id] = probability
        on_scored()
    scores = combine(words, heads, [yes.get(clip.id) for clip in clips])
    unread = {clip.id for clip in candidates} - yes.keys()  # removed by an update
    ordered = sorted(
        (
            (score, clip)
            for score, clip in zip(scores, clips, strict=True)
            if clip.id in yes or (clip.id in said and clip.id not in unread)
        ),
        key=lambda each: -each[0],
    )
    return _hits(index, ordered[:top], evidence, yes)


def search_like(
    client: Client,
    index: RetrievalIndex,
    picture: bytes,
    *,
    inside: Sequence[str | Path] = (),
    top: int | None = None,
    stop: threading.Event | None = None,
    on_read: Callable[[], None] = lambda: None,
) -> list[Hit]:
    """Rank the clips of an index by their likeness to a picture: copies of it first, then what looks like it.

    The likeness is the cosine of the base model's embeddings (means of the last states) of the picture and of a clip's
    nearest frame, from -1 to 1. Values are standardized over the index, because much of them is common to all pictures.
    The picture is also compared with its borders continued, which finds pictures that it was cut out of. Embeddings of
    frames are computed by the first search, and kept in the index.

    Args:
        picture: Encoded.
        inside, top, stop, on_read: As in `search`; on_read is called for each clip without embeddings.

    Raises:
        BadConfig: As `search`.
    """
    check_model(client, index)
    clips = _clips_to_search(index, inside)

    def embed(frames: Sequence[bytes]) -> list[bytes]:
        found = client.embed([[frame] for frame in frames], pooling="mean")
        return [np.array(each, np.float32).tobytes() for each in found]

    known = index.embeddings()
    missing = _frames([clip for clip in clips if (clip.id, 0) not in known], index, stop)
    for (clip, _), vectors in in_order(lambda read: embed(read[1]), missing):
        index.add_embeddings(clip.id, vectors)
        on_read()
    by_id = {clip.id: clip for clip in clips}
    frames = [(clip, vector) for (clip, _), vector in index.embeddings().items() if clip in by_id]
    asked = embed([widened(picture, margin) for margin in _MARGINS])
    values = np.array([np.frombuffer(each, np.float32) for each in (*(each for _, each in frames), *asked)])
    own = values[: len(frames)]
    if len(frames) >= _COMPARABLE:
        values = (values - own.mean(0)) / np.maximum(own.std(0), _CONSTANT)
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), _CONSTANT)
    scores = (values[: len(frames)] @ values[len(frames) :].T).max(1).tolist()
    likeness: dict[int, float] = {}
    for (clip_id, _), score in zip(frames, scores, strict=True):
        likeness[clip_id] = max(score, likeness.get(clip_id, -1.0))
    ordered = sorted(((score, by_id[clip_id]) for clip_id, score in likeness.items()), key=lambda each: -each[0])
    return _hits(index, ordered[:top], dict.fromkeys(likeness, NO_EVIDENCE), {})


def _clips_to_search(index: RetrievalIndex, inside: Sequence[str | Path]) -> list[StoredClip]:
    if not (clips := clips_inside(index.clips(), inside)):
        raise BadConfig(
            f"index {str(index.path)!r} contains no clip{' of these files' if inside else ''}; index videos"
        )
    return clips


def _hits(
    index: RetrievalIndex,
    ordered: Sequence[tuple[float, StoredClip]],
    evidence: Mapping[int, Evidence],
    yes: Mapping[int, float],
) -> list[Hit]:
    return [
        Hit(
            rank=rank,
            source=clip.path,
            start_s=clip.start_s,
            seconds=clip.seconds,
            score=score,
            yes=yes.get(clip.id),
            statements=tuple(index.statements(clip.id)),
            clip=clip.id,
            **evidence[clip.id]._asdict(),
        )
        for rank, (score, clip) in enumerate(ordered, 1)
    ]


def combine(words: Sequence[float], heads: Sequence[float], yes: Sequence[float | None]) -> list[float]:
    """The probability that each clip fits, from signals between 0 and 1 about all clips; None where one is unknown.

    Bayes' rule, with the index as its own reference: the log odds of a clip are those of the mean of the signals that
    are not 0 everywhere, and for each signal its log odds less those of its mean, times its weight (`_weights`).
    """
    read = np.array([value is not None for value in yes])
    known = np.array([np.ones_like(read), np.ones_like(read), read])
    signals = np.array([words, heads, [value or 0.0 for value in yes]])
    means = signals.sum(1, keepdims=True) / np.maximum(1, known.sum(1, keepdims=True))
    odds = known * (_log_odds(signals, _DOUBTS) - _log_odds(means, _DOUBTS))
    compared = read if read.any() else ~read
    weights = _weights(odds[:, compared], signals[:2, compared])
    prior = _log_odds(means.sum() / max(1, np.count_nonzero(means)), _DOUBTS[0])
    scores: list[float] = (1 / (1 + np.exp(-prior - weights @ odds))).tolist()
    return scores


def _weights(odds: np.ndarray, cheap: np.ndarray) -> np.ndarray:
    """Weights of words, heads and the model: how far another signal confirms each, by the correlation of their odds.

    Of words and heads, the one that is confirmed better has weight 1. The model has weight 1 if words and heads are
    equal for all clips; the more they prefer one, the more its weight is its correlation with one of them. odds: of
    each signal, by clip that the model has read. cheap: words and heads of these clips.
    """
    if odds.shape[1] < _COMPARABLE:
        return np.ones(3)
    centered = odds - odds.mean(1, keepdims=True)
    lengths = np.linalg.norm(centered, axis=1)
    lengths[lengths < _CONSTANT] = np.inf
    correlations = centered @ centered.T / np.outer(lengths, lengths)
    np.fill_diagonal(correlations, 0.0)
    words, heads, yes = correlations.max(1)  # at least 0, the diagonal
    chance = odds.shape[1] ** -0.5
    best = max(words, heads) + chance
    clear = min(1.0, (cheap.max(1) - cheap.mean(1)).max() / _CLEAR) ** 2
    return np.array([(words + chance) / best, (heads + chance) / best, 1 - clear * (1 - yes)])


def _log_odds(probability: np.ndarray, doubt: np.ndarray) -> np.ndarray:
    odds: np.ndarray = np.log((probability + doubt) / (1 - probability + doubt))
    return odds


def select_candidates(clips: Sequence[StoredClip], scores: Mapping[int, float], most: int) -> list[StoredClip]:
    """At most `most` clips: those with a score, best first, then others evenly over all files."""
    found = sorted((clip for clip in clips if clip.id in scores), key=lambda clip: -scores[clip.id])[:most]
    others = [clip for clip in clips if clip.id not in scores]
    free = min(most - len(found), len(others))
    return found + ([others[place] for place in sorted(set(spread(free, len(others))))] if free else [])


def _scores(
    client: Client,
    index: RetrievalIndex,
    clips: Sequence[StoredClip],
    asked: str,
    adapter: str | None,
    num_frames: int,
    stop: threading.Event | None,
) -> Iterator[tuple[StoredClip, float]]:
    def shown(stored: Sequence[bytes]) -> list[bytes]:
        return [stored[place] for place in spread(min(num_frames, len(stored)), len(stored))]

    found = in_order(lambda read: client.score(asked, [shown(read[1])], adapter)[0], _frames(clips, index, stop))
    return ((clip, probability) for (clip, _), probability in found)


def _frames(
    clips: Sequence[StoredClip], index: RetrievalIndex, stop: threading.Event | None
) -> Iterator[tuple[StoredClip, Sequence[bytes]]]:
    """The stored frames of clips, without those that an update removes meanwhile."""
    for clip in clips:
        if stop is not None and stop.is_set():
            return
        if stored := index.frames(clip.id):
            yield clip, stored


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
