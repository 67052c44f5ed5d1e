"""Recall of retrieval on videos with queries that describe exactly one of their seconds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

from apps.retrieval.contact_sheet import write_sheet
from apps.retrieval.indexing import make_settings, update_index
from apps.retrieval.ranking import Hit, search
from apps.retrieval.store import RetrievalIndex, StoredClip
from vlora.client import Client

AT = (1, 5, 10)
"""The k of recall at k."""
NUM_FEW = 20
"""Candidates of the method that ranks few of the clips."""
RANDOM = "random"
BASE_WORDS, BASE = "base model, words of captions", "base model, VQAScore"
WORDS, ADAPTER = "adapter, words of captions", "adapter, VQAScore"
FEW = f"adapter, VQAScore of {NUM_FEW} by words"


class Query(Protocol):
    """A text, and the only second that it describes, by the name of its file."""

    @property
    def text(self) -> str: ...
    @property
    def video(self) -> str: ...
    @property
    def second(self) -> int: ...


class Ranking(NamedTuple):
    """Of one query. rank: of the second that it describes, from 1; None if it is not among the results. own, others:
    its score, and the mean score of the other results; None where the method has no probability.
    """

    rank: int | None
    own: float | None = None
    others: float | None = None


def measure(
    client: Client,
    folder: Path,
    work: Path,
    queries: Sequence[Query],
    *,
    name: str,
    adapter: str,
    num_frames: int,
    base_caption: str,
    caption: str,
    question: str,
    say: Callable[[str], None],
    sheet: Path | None = None,
) -> list[dict[str, Any]]:
    """Rank a folder's videos for every query by every method; a row per method.

    Args:
        work: folder for the indexes.
        name: of the videos, in the rows.
        num_frames, question: as for `search`. base_caption, caption: questions for the words of the base model's and
            the adapter's index.
        sheet: the contact sheet to write, of the first query's results.
    """
    rows: list[dict[str, Any]] = []

    def add(method: str, rankings: Sequence[Ranking]) -> None:
        rows.append({"videos": name, "method": method, **summary(rankings), "queries": len(queries)})
        say(", ".join(f"{column} {value}" for column, value in rows[-1].items()))

    for asked, owner, words, scores in ((base_caption, None, BASE_WORDS, BASE), (caption, adapter, WORDS, ADAPTER)):
        path = work / f"{name}-{owner or 'base'}.sqlite"
        path.unlink(missing_ok=True)
        owners = () if owner is None else (owner,)
        settings = make_settings(client, adapters=owners, questions=(asked,), num_frames=num_frames)
        with RetrievalIndex(path, settings) as index:
            update_index(client, index, [folder])
            clips = index.clips()

            def find(query: str, most: int, index: RetrievalIndex = index, owner: str | None = owner) -> list[Hit]:
                options: dict[str, Any] = {"question": question, "num_frames": num_frames, "num_candidates": most}
                return search(client, index, query, adapter=owner, **options)

            if not rows:
                rows.append(
                    {"videos": name, "method": RANDOM, **expected_by_chance(len(clips)), "queries": len(queries)}
                )
            add(words, [_by_words(clips, index.match(query.text), query) for query in queries])
            add(scores, [_of_hits(find(query.text, len(clips)), query) for query in queries])
            if owner is not None:
                add(FEW, [_of_hits(find(query.text, NUM_FEW), query) for query in queries])
                if sheet is not None:
                    hits = find(queries[0].text, NUM_FEW)[:10]
                    write_sheet(sheet, queries[0].text, hits, [index.frames(hit.clip) for hit in hits])
    return rows


def summary(rankings: Sequence[Ranking]) -> dict[str, float | None]:
    """Recall at k and mean reciprocal rank; mean scores of the described seconds and of the others."""
    recalls = {f"recall at {k}": mean(each.rank is not None and each.rank <= k for each in rankings) for k in AT}
    own = [each.own for each in rankings if each.own is not None]
    others = [each.others for each in rankings if each.others is not None]
    return {
        **{name: float(value) for name, value in recalls.items()},
        "MRR": mean(0.0 if each.rank is None else 1 / each.rank for each in rankings),
        "vqa-score": mean(own) if own else None,
        "of others": mean(others) if others else None,
    }


def expected_by_chance(num_clips: int) -> dict[str, float | None]:
    """The expected values of `summary` for an order at random, in which every rank is equally likely."""
    recalls: dict[str, float | None] = {f"recall at {k}": min(1.0, k / num_clips) for k in AT}
    reciprocal = mean(1 / rank for rank in range(1, num_clips + 1))
    return recalls | {"MRR": reciprocal, "vqa-score": None, "of others": None}


class RecallGoal(NamedTuple):
    """A target: `value` must be at least `goal`."""

    name: str
    value: float
    goal: float
    at_most: bool = False


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[RecallGoal]:
    """For each folder of videos: the adapter finds more than the base model, and few candidates lose little."""
    found = {(row["videos"], row["method"]): row for row in rows}
    goals = []
    for videos in dict.fromkeys(row["videos"] for row in rows):
        base, adapter, few = (found[videos, method] for method in (BASE, ADAPTER, FEW))
        more = adapter["recall at 5"] - base["recall at 5"]
        lost = few["recall at 10"] - adapter["recall at 10"]
        goals += [
            RecallGoal(f"{videos}: recall at 5, adapter less base model", more, 0.1),
            RecallGoal(f"{videos}: recall at 10, few candidates less all clips", lost, -0.05),
        ]
    return goals


def _by_words(clips: Sequence[StoredClip], matched: dict[int, float], query: Query) -> Ranking:
    """Rank by words alone. Among clips with equal scores the described one has the mean place."""
    described = next(clip for clip in clips if _is_described(clip.path, clip.start_s, query))
    if (score := matched.get(described.id)) is None:
        return Ranking(None)
    above = sum(other > score for other in matched.values())
    equal = sum(other == score for other in matched.values())
    return Ranking(above + (equal + 1) // 2)


def _of_hits(hits: Sequence[Hit], query: Query) -> Ranking:
    described = next((hit for hit in hits if _is_described(hit.source, hit.start_s, query)), None)
    others = [hit.score for hit in hits if hit is not described]
    average = mean(others) if others else None
    return Ranking(None, None, average) if described is None else Ranking(described.rank, described.score, average)


def _is_described(path: str, start_s: float, query: Query) -> bool:
    return Path(path).name == query.video and int(start_s) == query.second
