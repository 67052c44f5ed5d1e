"""The report of a run."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from rich.console import Console

from fusion.data.samples import Sample, Splits
from fusion.packing.algorithm import Score, TrainingResult, format_scores, pack
from fusion.plan.schema import DomainPlan, LoraPlan, Plan
from fusion.report.build import capacity_points, lanes_of, page, timeline
from fusion.report.examples import Example, confusion_of, examples_of
from fusion.report.report import (
    AdapterReport,
    BrokenReport,
    ConfusionReport,
    DomainReport,
    FusionReport,
    RollbackReport,
    StepReport,
    model_card,
)
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.small import color_splits


def report(lora: LoraPlan | None = None, planned: tuple[str, ...] = ()) -> FusionReport:
    names = ("signs", "digits")
    plan = Plan(
        lora=lora or LoraPlan(),
        confidence=0.95,
        domains=tuple(
            DomainPlan(name=name, source="made", question="what?", threshold=0.8) for name in (*names, *planned)
        ),
    )

    def train(adapter: tuple[str, ...]) -> TrainingResult:
        return TrainingResult(
            {name: Score(0.9, 0.85 if len(adapter) == 1 else 0.75) for name in adapter}, 2.0, (1.0, 0.5)
        )

    packing = pack(names, dict.fromkeys(names, 0.8), train)
    assert packing is not None
    domains = tuple(
        DomainReport(name, "classification", "synthetic", "accuracy", 0.8, 0.1, 0.9, 0.85, 0.88, True, name, 500, 0.7)
        for name in names
    )
    adapters = tuple(AdapterReport(name, (name,), (name,), ()) for name in names)
    steps = timeline(packing)
    return FusionReport("embedded", 0, 6.0, 0.95, domains, adapters, (), steps, (), None, plan.model_dump(mode="json"))


def test_the_timeline_lists_every_training_in_order(tmp_path: Path) -> None:
    report().write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert [(*step["domains"], step["into"], step["kept"], step["begin"]) for step in written["timeline"]] == [
        ("signs", [], True, 0.0),
        ("digits", ["signs"], False, 2.0),
        ("digits", [], True, 4.0),
    ]
    rolled_back = written["timeline"][1]
    assert rolled_back["values"] == dict.fromkeys(("signs", "digits"), 0.9) and rolled_back["losses"] == [1.0, 0.5]
    assert rolled_back["bounds"] == dict.fromkeys(("signs", "digits"), 0.75)
    assert written["plan"]["training"]["patience"] is None


def test_an_adapters_card_has_its_scores_and_thresholds() -> None:
    made = report(LoraPlan(rank=4, rslora=True, targets=("q_proj", "v_proj"), vision=True))
    card = model_card(made, made.adapters[1])
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"base_model": "embedded", "library_name": "peft"}
    assert "| digits | classification | synthetic | accuracy | 0.800 | 0.900 | 0.850 | 0.880 | 500 |" in body
    assert "confidence 0.95" in body and "| signs |" not in body
    assert "rank-stabilised, on q_proj, v_proj of the language model and all of the vision side." in body
    missed = replace(made, domains=tuple(replace(domain, met=False) for domain in made.domains))
    assert "0.850 (missed)" in model_card(missed, missed.adapters[1])


BOTH = AdapterReport("signs-digits", ("signs", "digits"), ("signs",), ("digits",))
JOINTLY = replace(BOTH, together=("digits", "signs"), joined=())
GUIDED = replace(BOTH, together=("photos", "signs"), joined=("digits",))
THREE = replace(BOTH, domains=("signs", "digits", "photos"), together=("signs", "digits", "photos"), joined=())
TRAINED = "Trained for at most 300 steps of 32 samples per domain: "
HEADS = "Heads that were trained by themselves"
IN_TURN = "Then trained for as many, one after the other: digits;\n50% of each batch"
LEFT = "at once.\nOf these, photos did not stay in the adapter.\nThen"
HEAD_ALONE = "by themselves, for at most 1500 steps of 128 samples each: digits.\nThe LoRA was not"


@pytest.mark.parametrize(
    ("adapter", "task", "shown", "absent"),
    [
        (0, "classification", [f"{TRAINED}signs.\n"], ["of each batch", "by themselves"]),
        (BOTH, "classification", [f"{TRAINED}signs.\n{IN_TURN}"], []),
        (JOINTLY, "classification", [f"{TRAINED}digits, signs at once.\n"], ["of each batch"]),
        (GUIDED, "classification", [f"{TRAINED}photos, signs {LEFT}", IN_TURN], []),
        # Heads that train by themselves.
        (0, "detection", [f"{TRAINED}signs.\n"], ["by themselves"]),
        (1, "detection", [HEAD_ALONE], ["300 steps"]),
        (replace(BOTH, together=("signs", "digits"), joined=()), "detection", [f"{TRAINED}signs.\n{HEADS}"], []),
        (replace(BOTH, together=("digits",), joined=("signs",)), "detection", [f"{TRAINED}signs.\n{HEADS}"], []),
        (THREE, "detection", [f"{TRAINED}signs, photos at once.\n{HEADS}"], []),
    ],
)
def test_an_adapters_card_describes_its_training(
    adapter: AdapterReport | int, task: str, shown: list[str], absent: list[str]
) -> None:
    made = report()
    made = replace(made, domains=(made.domains[0], replace(made.domains[1], task=task)))
    own = made.adapters[adapter] if isinstance(adapter, int) else adapter
    card = model_card(made, own)
    assert all(text in card for text in shown) and not any(text in card for text in absent)
    made.plan["lora"]["vision"] = True
    assert "by themselves" not in model_card(made, own)


def test_the_table_has_bounds_if_a_confidence_is_set_and_cuts_nothing() -> None:
    def shown(made: FusionReport) -> str:
        console = Console(width=60, file=io.StringIO())
        console.print(made.table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    made = report()
    one = replace(made, domains=made.domains[:1], adapters=made.adapters[:1], confidence=None)
    assert "2 domains in 2 adapters, 6 s" in shown(made) and "1 domain in 1 adapter, 6 s" in shown(one)
    assert "0.850" in shown(made) and "0.850" not in shown(one)
    assert "…" not in shown(made)
    assert made.in_words() == "accuracy in words, for domains with heads: signs 0.700, digits 0.700"
    wordless = replace(made, domains=tuple(replace(d, words=None) for d in made.domains))
    assert wordless.in_words() == ""
    thresholds = {"digits": 0.88}
    assert format_scores({"digits": Score(0.93, 0.93)}, thresholds) == "digits 0.930 (threshold 0.880)"
    bounded = format_scores({"digits": Score(0.93, 0.912)}, thresholds)
    assert bounded == "digits 0.930 (lower bound 0.912, threshold 0.880)"


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
    made = replace(
        made,
        domains=(first, replace(second, after=0.7)),
        rollbacks=(
            RollbackReport(("digits",), ("signs",), {"digits": BrokenReport(0.75, 0.71, 0.8)}),
            RollbackReport(("digits", "signs"), (), {"signs": BrokenReport(0.74, 0.7, 0.8)}, ("digits",)),
            RollbackReport(("digits",), ("signs",), {}),
        ),
        confusions=(ConfusionReport("signs", ("stop", "go"), ((9, 1), (0, 10))),),
    )
    shown = Page(page(made, {}))
    name = "signsclassification, synthetic pixels, accuracy"
    assert [name, "yes", "0.800given", "0.900", "0.850", "0.100", "0.880of 500", "0.700"] in shown.rows
    assert next(row for row in shown.rows if row[0].startswith("digitsclass"))[1] == "not on test"
    # The accuracy matrix: signs alone, both (rolled back), digits alone.
    assert ["signs", "0.900", "0.900", ""] in shown.rows and ["digits", "", "0.900", "0.900"] in shown.rows
    low = [tag for tag, attributes in shown.tags if tag == "td" and "low" in (attributes.get("class") or "").split()]
    assert len(low) == 2  # both bounds were 0.75 in the step that was rolled back
    assert ["digits", "signs", "digits0.710 < 0.800", "none"] in shown.rows
    assert ["digits, signs", "each other", "signs0.700 < 0.800", "digits"] in shown.rows
    assert ["digits", "signs", "none; another domain of their adapter did not fit", "none"] in shown.rows
    assert [row[2] for row in shown.rows if "model card" in row[0]] == ["met", "met"]
    assert ["stop", "9", "1"] in shown.rows and ["go", "", "10"] in shown.rows
    links = [attributes["href"] for tag, attributes in shown.tags if tag == "a"]
    assert links == [f"adapters/{name}/{file}" for name in ("signs", "digits") for file in ("", "README.md")]
    # A phone shows the tables without their heads: each cell names its column.
    cells = [attributes for tag, attributes in shown.tags if tag == "td" and "data-of" in attributes]
    assert {cell["data-of"] for cell in cells} >= {"met", "threshold", "test", "with", "kept of it", "domains"}


def test_the_page_has_no_network_no_script_and_escapes_text() -> None:
    bad = '<script>alert("x")</script>'
    made = replace(report(), base=bad, confusions=(ConfusionReport("signs", (bad, "go"), ((1, 0), (0, 1))),))
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
    # Joint training: a failed set has no lane of its own, and a merged set has the lane of the union.
    bad = {"a": 0.9, "b": 0.4, "c": 0.9, "d": 0.9}
    tried = ("abcd", False), ("cd", True), ("ab", False), ("a", True), ("b", True), ("acd", True), ("bcd", False)
    joint = [StepReport(tuple(names), (), kept, 0.0, 1.0, bad, bad, (1.0,)) for names, kept in tried]
    assert lanes_of(joint, (("a", "c", "d"), ("b",))) == (0, 0, 0, 0, 1, 0, 0)


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


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        ((1, 29), [1, 29, 0, 2, 3, 4]),
        ((1, 3, 5, 7, 9, 11), [1, 3, 5, 7, 0, 2]),
        (range(29), [0, 1, 2, 3, 4, 29]),
        (range(30), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_examples_show_errors_first(wrong: Sequence[int], shown: list[int]) -> None:
    splits = color_splits()
    answers = [(sample.target + (place in wrong)) % 3 for place, sample in enumerate(splits.test)]  # type: ignore[operator]
    found = examples_of(splits.test, answers, splits.labels, objective_of(splits, None), "what color ?")
    assert [example.score for example in found] == [float(place not in wrong) for place in shown]
    assert [example.answer == example.wanted for example in found] == [place not in wrong for place in shown]
    for example, place in zip(found, shown, strict=True):
        assert int(decoded(example.pictures[0]).mean((0, 1)).argmax()) == splits.test[place].target


def test_a_partly_right_answer_follows_the_wrong_ones() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    boxes = [Box(0, 0.1, 0.1, 0.4, 0.4), Box(0, 0.5, 0.5, 0.9, 0.9)]
    splits = Splits(
        "detection", ("car",), *([Sample((black,), targets) for targets in ((), (*boxes,), (*boxes,))],) * 3, real=False
    )
    found = examples_of(splits.test, [(), (boxes[0],), ()], splits.labels, objective_of(splits, None), "what ?")
    assert [example.wanted for example in found] == ["car, car", "car, car", "nothing"]
    assert [round(example.score, 2) for example in found] == [0.0, 0.67, 1.0]
    words = Splits("captioning", (), *([Sample((black,), "a car")],) * 3, real=False)
    (unknown,) = examples_of(words.test, [None], (), objective_of(words, None), "what ?")
    assert unknown.answer is None and unknown.score == 0


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


def blocks(made: FusionReport) -> list[tuple[str, str]]:
    """The class and the text of each training in the timeline."""
    found = re.findall(r'<p class="(\w+)" style="left:[^>]*><b>([^<]*)</b><br>([^<]*)</p>', page(made, {}))
    return [(kind, f"{first}: {second}") for kind, first, second in found]


def test_the_timeline_shows_what_became_of_each_training() -> None:
    made = report(planned=("photos",))
    values = {"signs": 0.9, "digits": 0.4, "photos": 0.9}
    joint = StepReport(tuple(values), (), True, 0.0, 1.0, values, values, (1.0,), removed=("digits",))
    points = capacity_points([joint])
    assert {name: own[0].kept for name, own in points.items()} == {"signs": True, "digits": False, "photos": True}
    rollback = RollbackReport(tuple(values), (), {"digits": BrokenReport(0.4, 0.3, 0.8)}, ("signs", "photos"))
    photos = replace(made.domains[0], name="photos", adapter="signs")
    made = replace(made, domains=(*made.domains, photos), rollbacks=(rollback,), timeline=(joint,))
    shown = page(made, {})
    assert "0 rolled back" in shown and "1 partly kept" in shown
    assert blocks(made) == [("partly", "1. signs, digits, photos: partly kept: digits too low")]
    # A join that was undone breaks no threshold; an adapter of a domain that misses its threshold alone is kept.
    steps = (
        step("signs", (), True, signs=0.9),
        step("photos", ("signs",), False, signs=0.9, photos=0.9),
        step("photos", ("signs",), False, signs=0.9, photos=0.7),
        step("digits", (), True, digits=0.7),
    )
    assert blocks(replace(made, timeline=steps)) == [
        ("kept", "1. signs: kept"),
        ("rolled", "2. photos: rolled back"),
        ("rolled", "3. photos: rolled back: photos too low"),
        ("missed", "4. digits: missed: digits too low"),
    ]
    missed = replace(made, domains=tuple(replace(domain, met=domain.name != "digits") for domain in made.domains))
    assert [row[2] for row in Page(page(missed, {})).rows if "model card" in row[0]] == ["met", "missed: digits"]
