"""Recall and reciprocal rank, on rankings whose values are known, and over a scripted client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from apps.retrieval.measuring import (
    ADAPTER,
    BASE,
    BASE_WORDS,
    FEW,
    RANDOM,
    WORDS,
    Ranking,
    expected_by_chance,
    goals_of,
    measure,
    summary,
)
from tests.apps.scripted_retrieval import SHADES, ScriptedClient
from tests.video_files import write_video
from vlora.client import Client


class Described(NamedTuple):
    text: str
    video: str
    second: int


def test_recall_counts_ranks_up_to_k() -> None:
    found = summary([Ranking(1, 0.9, 0.1), Ranking(5, 0.5, 0.3), Ranking(10), Ranking(None)])
    assert found == {
        "recall at 1": 0.25,
        "recall at 5": 0.5,
        "recall at 10": 0.75,
        "MRR": pytest.approx((1 + 1 / 5 + 1 / 10) / 4),
        "vqa-score": pytest.approx(0.7),
        "of others": pytest.approx(0.2),
    }


def test_a_random_order_has_every_rank_equally_often() -> None:
    found = expected_by_chance(20)
    ranks = range(1, 21)
    every = summary([Ranking(rank) for rank in ranks])
    assert {name: pytest.approx(value) for name, value in found.items()} == every


def test_every_method_is_measured_on_the_same_queries(tmp_path: Path) -> None:
    order = ("dim", "bright", "dark", "grey")
    (tmp_path / "shades").mkdir()
    write_video(tmp_path / "shades" / "a.mp4", [SHADES[name] for name in order])
    queries = [Described(name, "a.mp4", second) for second, name in enumerate(order)]
    said: list[str] = []
    rows: list[dict[str, Any]] = measure(
        cast(Client, ScriptedClient()),
        tmp_path / "shades",
        tmp_path,
        queries,
        name="shades",
        adapter="cam",
        num_frames=1,
        base_caption="describe the image.",
        caption="describe the image.",
        question="Is there {}?",
        say=said.append,
        sheet=tmp_path / "sheet.png",
    )
    assert [row["method"] for row in rows] == [RANDOM, BASE_WORDS, BASE, WORDS, ADAPTER, FEW]
    assert rows[0]["recall at 1"] == 0.25 and all(row["queries"] == 4 for row in rows)
    assert all(row["recall at 1"] == row["MRR"] == 1.0 for row in rows[1:])
    assert rows[2]["vqa-score"] > 0.85 > 0.75 > rows[2]["of others"]
    assert len(said) == 5 and (tmp_path / "sheet.png").exists()
    wrong = [query._replace(second=(query.second + 1) % 4) for query in queries]
    rows = measure(
        cast(Client, ScriptedClient()),
        tmp_path / "shades",
        tmp_path,
        wrong,
        name="shades",
        adapter="cam",
        num_frames=1,
        base_caption="describe the image.",
        caption="describe the image.",
        question="Is there {}?",
        say=said.append,
    )
    assert all(row["recall at 1"] == 0.0 for row in rows[1:]), "the figures do not come from the order of the clips"
    assert rows[1]["recall at 10"] == 0.0 and rows[2]["recall at 10"] == 1.0, "words find no other second"


def test_goals_compare_the_adapter_with_the_base_and_few_with_all() -> None:
    def row(videos: str, method: str, at_5: float, at_10: float) -> dict[str, Any]:
        return {"videos": videos, "method": method, "recall at 5": at_5, "recall at 10": at_10}

    goals = goals_of(
        [
            *(row("a", method, 0.5, 0.75) for method in (RANDOM, BASE_WORDS, WORDS)),
            *(row("a", BASE, 0.25, 0.5), row("a", ADAPTER, 0.75, 1.0), row("a", FEW, 0.0, 0.5)),
            *(row("b", BASE, 0.5, 0.5), row("b", ADAPTER, 0.25, 0.5), row("b", FEW, 0.0, 0.75)),
        ]
    )
    assert [(goal.name[:1], goal.value, goal.at_most) for goal in goals] == [
        ("a", 0.5, False),
        ("a", -0.5, False),
        ("b", -0.25, False),
        ("b", 0.25, False),
    ]
