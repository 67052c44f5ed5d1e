"""The report page: its content, and that it loads nothing from the network."""

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest

from fusion.data.samples import Sample, Splits
from fusion.report.charts import capacity_points, lanes_of, timeline_chart
from fusion.report.examples import Example, confusion_of, examples_of
from fusion.report.page import page
from fusion.report.report import BrokenReport, ConfusionReport, RollbackReport, StepReport
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.small import color_splits
from tests.fusion.test_report import report


class Page(HTMLParser):
    """Tags with their attributes, text of table rows, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "link"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data.strip()


def step(domain: str, into: tuple[str, ...], kept: bool, **values: float) -> StepReport:
    return StepReport((domain,), into, kept, 0.0, 1.0, values, values, (1.0,))


def test_the_page_shows_the_report() -> None:
    made = report()
    first, second = made.domains
    made = dataclasses.replace(
        made,
        domains=(first, dataclasses.replace(second, after=0.7)),
        rollbacks=(
            RollbackReport(("digits",), ("signs",), {"digits": BrokenReport(0.75, 0.71, 0.8)}),
            RollbackReport(("digits", "signs"), (), {"signs": BrokenReport(0.74, 0.7, 0.8)}, ("digits",)),
            RollbackReport(("digits",), ("signs",), {}),
        ),
        confusions=(ConfusionReport("signs", ("stop", "go"), ((9, 1), (0, 10))),),
    )
    shown = Page(page(made, {}))
    kept = ["given", "0.800", "0.900", "0.850", "0.100", "0.880", "0.700", "500", "yes"]
    assert ["signs", "classification", "synthetic", "accuracy", *kept] in shown.rows
    assert next(row for row in shown.rows if row[:2] == ["digits", "classification"])[-1] == "not on test"
    # The accuracy matrix: signs alone, both (rolled back), digits alone.
    assert ["signs", "0.900", "0.900", ""] in shown.rows and ["digits", "", "0.900", "0.900"] in shown.rows
    low = [tag for tag, attributes in shown.tags if tag == "td" and attributes.get("class") == "low"]
    assert len(low) == 2  # both bounds were 0.75 in the step that was rolled back
    assert ["digits", "signs", "digits", "0.750", "0.710", "0.800", "none"] in shown.rows
    assert ["digits, signs", "each other", "signs", "0.740", "0.700", "0.800", "digits"] in shown.rows
    assert ["digits", "signs", "none; another domain of their adapter did not fit", "none"] in shown.rows
    assert ["stop", "9", "1"] in shown.rows and ["go", "", "10"] in shown.rows
    links = [attributes["href"] for tag, attributes in shown.tags if tag == "a"]
    assert links == [f"adapters/{name}/{file}" for name in ("signs", "digits") for file in ("", "README.md")]


def test_the_page_has_no_network_no_script_and_escapes_text() -> None:
    bad = '<script>alert("x")</script>'
    made = dataclasses.replace(
        report(), base=bad, confusions=(ConfusionReport("signs", (bad, "go"), ((1, 0), (0, 1))),)
    )
    picture = "data:image/jpeg;base64,AAAA"
    text = page(made, {"signs": (Example((picture,), f"{bad}?", bad, None, 1.0),)})
    shown = Page(text)
    assert "script" not in {tag for tag, _ in shown.tags}
    sources = [attributes.get(name) for _, attributes in shown.tags for name in ("src", "href") if name in attributes]
    assert picture in sources and all(source and not re.match(r"https?:|//", source) for source in sources)
    assert "url(" not in text and "@import" not in text


def test_lanes_follow_adapters_through_rollbacks() -> None:
    steps = (
        step("a", (), True, a=0.9),
        step("b", ("a",), False, a=0.4, b=0.9),
        step("b", (), True, b=0.9),
        step("c", ("a",), True, a=0.9, c=0.8),
        step("d", ("a", "c"), False, a=0.3, c=0.8, d=0.9),
        step("d", ("b",), True, b=0.9, d=0.9),
    )
    assert lanes_of(steps, (("a", "c"), ("b", "d"))) == (0, 0, 1, 0, 0, 1)
    assert capacity_points(steps)["a"] == [(1, 0.9, True), (2, 0.4, False), (2, 0.9, True), (3, 0.3, False)]


def test_lanes_are_those_of_the_final_adapters() -> None:
    """Joint training: a failed set has no lane of its own, and a merged set has the lane of the union."""
    bad = {"a": 0.9, "b": 0.4, "c": 0.9, "d": 0.9}
    tried = ("abcd", False), ("cd", True), ("ab", False), ("a", True), ("b", True), ("acd", True), ("bcd", False)
    steps = [StepReport(tuple(names), (), kept, 0.0, 1.0, bad, bad, (1.0,)) for names, kept in tried]
    assert lanes_of(steps, (("a", "c", "d"), ("b",))) == (0, 0, 0, 0, 1, 0, 0)


def test_the_confusion_matrix() -> None:
    found = confusion_of("d", ("x", "y"), [0, 1, 1, 1], [0, 0, 1, 1])
    assert found == ConfusionReport("d", ("x", "y"), ((1, 1), (0, 2)))
    assert confusion_of("words", (), [True], ["a car"]) is None
    assert confusion_of("several", ("x",), [(0,)], [(0,)]) is None


def decoded(url: str) -> np.ndarray:
    encoded = np.frombuffer(base64.b64decode(url.partition(",")[2]), np.uint8)
    picture = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    assert picture is not None
    return picture[..., ::-1].astype(int)


def test_examples_tell_right_from_wrong() -> None:
    splits = color_splits()
    answers = [(sample.target + (place == 1)) % 3 for place, sample in enumerate(splits.test)]  # type: ignore[operator]
    found = examples_of(splits.test, answers, splits.labels, objective_of(splits, None), "what color ?")
    assert [example.score for example in found] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert [example.answer == example.wanted for example in found] == [True, False, True, True, True]
    shown = decoded(found[0].pictures[0]).mean((0, 1))
    assert int(shown.argmax()) == splits.test[0].target


@pytest.mark.parametrize("frames", [1, 4])
def test_boxes_are_drawn_where_they_are(frames: int) -> None:
    black = np.zeros((84, 84, 3), np.uint8)
    wanted, answer = Box(0, 0.1, 0.1, 0.4, 0.4, image=0), Box(0, 0.5, 0.5, 0.9, 0.9, image=frames - 1)
    splits = Splits("detection", ("car",), *([Sample((black,) * frames, (wanted,))],) * 3, real=False)
    (example,) = examples_of(splits.test, [(answer,)], splits.labels, objective_of(splits, None), "what ?")
    assert (example.answer, example.wanted, example.score) == ("car", "car", 0.0)
    assert len(example.pictures) == min(frames, 2)
    first, last = decoded(example.pictures[0]), decoded(example.pictures[-1])
    assert first[17:66, 17][:, 1].mean() > 120 and last[90:150, 84][:, 0].mean() > 150
    assert first[84:150, 84].max() < 60 if frames > 1 else first[84:150, 84].max() > 60


def test_domains_that_leave_a_kept_training_were_not_kept() -> None:
    values = {"a": 0.9, "b": 0.4, "c": 0.9}
    joint = StepReport(tuple("abc"), (), True, 0.0, 1.0, values, values, (1.0,), removed=("b",))
    drawn = timeline_chart([joint], [("a", "c")], dict.fromkeys("abc", 0.8))
    assert re.findall(r'class="second"[^>]*>([^<]*)<', drawn) == ["partly kept: b too low"]
    assert 'class="partly-kept"' in drawn
    points = capacity_points([joint])
    assert {name: own[0].kept for name, own in points.items()} == {"a": True, "b": False, "c": True}
    rollback = RollbackReport(tuple("abc"), (), {"b": BrokenReport(0.4, 0.3, 0.8)}, ("a", "c"))
    shown = page(dataclasses.replace(report(), rollbacks=(rollback,)), {})
    assert "0 rolled back" in shown and "1 partly kept" in shown


def test_a_join_that_was_undone_breaks_no_threshold() -> None:
    steps = (step("a", (), True, a=0.9), step("b", ("a",), False, a=0.9, b=0.9), step("b", ("a",), False, a=0.9, b=0.7))
    drawn = timeline_chart(steps, (("a",), ("b",)), {"a": 0.8, "b": 0.8})
    assert re.findall(r'class="second"[^>]*>([^<]*)<', drawn) == ["kept", "rolled back", "rolled back: b too low"]
