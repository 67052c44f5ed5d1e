"""Recall of retrieval, by each of its signals and by all together, on files with queries whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import cv2
import numpy as np

from apps.retrieval.contact_sheet import write_sheet
from apps.retrieval.indexing import make_settings, update_index
from apps.retrieval.ranking import Hit, search, search_like
from apps.retrieval.store import RetrievalIndex
from vlora.bench.harness import say
from vlora.bench.report import Goal
from vlora.client import Client

AT = (1, 5, 10)
"""The k of recall at k."""
NUM_FEW = 20
"""Candidates of the method with which the model reads few of the clips."""
RANDOM, TOGETHER, FEW = "random", "together", f"together, {NUM_FEW} read"
SIGNALS: Mapping[str, Callable[[Hit], float | None]] = {
    "words": lambda hit: hit.words,
    "heads": lambda hit: hit.heads,
    "yes": lambda hit: hit.yes,
}
"""What ranks alone, and its value; a clip for which that is 0 or None is not found."""
BASE, ADAPTER = "base model", "adapter"


class Query(NamedTuple):
    """A text, and all that it is true of: the names of files, each with a second, from 0; a picture has second 0."""

    text: str
    clips: tuple[tuple[str, int], ...]


class Collection(NamedTuple):
    """Files of a folder that are searched together. num_frames: of the clip that the model reads. base_caption,
    caption: the questions that are asked of each clip for the index, of the base model and of the adapter. heads: of
    the adapter, asked as well. queries: by the name of their group.
    """

    folder: str
    num_frames: int
    base_caption: str
    caption: str
    heads: list[str]
    queries: dict[str, list[Query]]


class Ranking(NamedTuple):
    """Of one query. places: of the clips found that it describes, from 1, increasing. wanted: all that it describes."""

    places: tuple[float, ...]
    wanted: int


def measure_recall(client: Client, own: Collection, work: Path, adapter: str, question: str) -> list[dict[str, Any]]:
    """Rank a collection's files for every query by every method; a row per group of queries and method.

    Args:
        work: Folder for the indexes, and for the contact sheet of the first query's results.
        question: As for `search`.
    """
    rows: list[dict[str, Any]] = []
    folder, num_frames = Path(own.folder), own.num_frames

    def add(group: str, method: str, scores: Mapping[str, float | None]) -> None:
        rows.append({"videos": group, "method": method, **scores, "queries": len(own.queries[group])})
        say(", ".join(f"{column} {value}" for column, value in rows[-1].items()))

    for owner, asked, owners in ((BASE, own.base_caption, ()), (ADAPTER, own.caption, (adapter,))):
        path = work / f"{folder.name}-{owner}.sqlite"
        path.unlink(missing_ok=True)
        settings = make_settings(
            client, adapters=owners, heads=own.heads if owners else (), questions=(asked,), num_frames=num_frames
        )
        with RetrievalIndex(path, settings) as index:
            update_index(client, index, [folder])
            num_clips = len(index.clips())

            def find(query: str, most: int, index: RetrievalIndex = index, owner: str = owner) -> list[Hit]:
                options: dict[str, Any] = {"question": question, "num_frames": num_frames, "num_candidates": most}
                return search(client, index, query, adapter=adapter if owner == ADAPTER else None, **options)

            for group, queries in own.queries.items():
                if owner == BASE:
                    add(group, RANDOM, expected_by_chance(num_clips, [len(query.clips) for query in queries]))
                found = [(find(query.text, num_clips), query) for query in queries]
                for signal, value in SIGNALS.items():
                    if signal != "heads" or settings.heads:
                        add(group, f"{owner}, {signal}", summary([ranked(hits, query, value) for hits, query in found]))
                add(group, f"{owner}, {TOGETHER}", summary([ranked(hits, query) for hits, query in found]))
                few = [ranked(find(query.text, NUM_FEW), query) for query in queries]
                add(group, f"{owner}, {FEW}", summary(few))
            if owner == ADAPTER:
                first = next(iter(own.queries.values()))[0].text
                hits = find(first, NUM_FEW)[:10]
                write_sheet(work / f"{folder.name}.png", first, hits, [index.frames(hit.clip) for hit in hits])
    return rows


def _jpeg(picture: np.ndarray, quality: int = 95) -> bytes:
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def _cut(picture: np.ndarray, share: float) -> bytes:
    rows, columns = (round(side * share) for side in picture.shape[:2])
    return _jpeg(picture[rows : len(picture) - rows, columns : picture.shape[1] - columns])


COPIES: Mapping[str, Callable[[np.ndarray], bytes]] = {
    "5 % cut off each side": lambda picture: _cut(picture, 0.05),
    "8 % cut off each side": lambda picture: _cut(picture, 0.08),
    "12 % cut off each side": lambda picture: _cut(picture, 0.12),
    "JPEG of quality 30": lambda picture: _jpeg(picture, 30),
    "JPEG of quality 10": lambda picture: _jpeg(picture, 10),
    "0.7 times as bright": lambda picture: _jpeg(cv2.convertScaleAbs(picture, alpha=0.7)),
    "1.3 times as bright": lambda picture: _jpeg(cv2.convertScaleAbs(picture, alpha=1.3)),
    "half as large": lambda picture: _jpeg(cv2.resize(picture, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)),
}
"""Near duplicates of a picture."""


def measure_copies(client: Client, path: Path, group: str) -> list[dict[str, Any]]:
    """Search an index for each of its clips by a near duplicate of the clip's first frame; a row per kind."""
    rows = []
    with RetrievalIndex(path) as index:
        clips = [(clip.id, index.frames(clip.id)[0]) for clip in index.clips()]
        for kind, copied in COPIES.items():
            places = []
            for clip, jpeg in clips:
                picture = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
                hits = search_like(client, index, copied(np.asarray(picture)))
                places.append(next(hit.rank for hit in hits if hit.clip == clip))
            scores = summary([Ranking((place,), 1) for place in places])
            rows.append({"videos": f"{group}, copies", "method": kind, **scores, "queries": len(places)})
            say(", ".join(f"{column} {value}" for column, value in rows[-1].items()))
    return rows


def ranked(hits: Sequence[Hit], query: Query, value: Callable[[Hit], float | None] = lambda hit: hit.score) -> Ranking:
    """The places of the described clips in the order of a value; among equal ones they are evenly spread."""
    places: list[float] = []
    values = {(Path(hit.source).name, int(hit.start_s)): found for hit in hits if (found := value(hit))}
    wanted = [values[clip] for clip in query.clips if clip in values]
    for one in sorted(set(wanted), reverse=True):
        above, equal = (sum(other > one for other in values.values()), sum(other == one for other in values.values()))
        step = (equal + 1) / (wanted.count(one) + 1)
        places += [above + step * number for number in range(1, wanted.count(one) + 1)]
    return Ranking(tuple(places), len(query.clips))


def summary(rankings: Sequence[Ranking]) -> dict[str, float | None]:
    """Recall at k, of the described clips that fit into k, and mean average precision."""
    recalls = {
        f"recall at {k}": mean(sum(place <= k for place in each.places) / min(k, each.wanted) for each in rankings)
        for k in AT
    }
    precisions = [sum(n / place for n, place in enumerate(each.places, 1)) / each.wanted for each in rankings]
    return {**recalls, "mAP": mean(precisions)}


def expected_by_chance(num_clips: int, wanted: Sequence[int]) -> dict[str, float | None]:
    """The expected values of `summary` for an order at random. wanted: the number of described clips, by query."""
    recalls = {
        f"recall at {k}": mean(min(k, num_clips) * each / num_clips / min(k, each) for each in wanted) for k in AT
    }
    others = max(1, num_clips - 1)
    precisions = [
        sum((1 + (place - 1) * (each - 1) / others) / place for place in range(1, num_clips + 1)) / num_clips
        for each in wanted
    ]
    return {**recalls, "mAP": mean(precisions)}


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """For each group of queries: the signals together find what the best one does, the adapter no less than the base
    model, and few candidates nearly as much as all.
    """
    found = {(row["videos"], row["method"]): row for row in rows}
    goals = []
    for videos in dict.fromkeys(row["videos"] for row in rows):
        for owner in (BASE, ADAPTER):
            alone = [found[key]["mAP"] for name in SIGNALS if (key := (videos, f"{owner}, {name}")) in found]
            together, few = found[videos, f"{owner}, {TOGETHER}"], found[videos, f"{owner}, {FEW}"]
            lost = few["recall at 10"] - together["recall at 10"]
            goals += [
                Goal(f"{videos}, {owner}: mAP, together less best signal", together["mAP"] - max(alone), -0.05, False),
                Goal(f"{videos}, {owner}: recall at 10, few candidates less all clips", lost, -0.05, False),
            ]
        base, more = (found[videos, f"{owner}, {TOGETHER}"]["recall at 5"] for owner in (BASE, ADAPTER))
        goals.append(Goal(f"{videos}: recall at 5, adapter less base model", more - base, -0.05, False))
    return goals
