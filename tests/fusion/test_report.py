"""The report of a run."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import yaml
from rich.console import Console

from fusion.packing.algorithm import Score, TrainingResult, format_scores, pack
from fusion.phases.report import timeline
from fusion.plan.schema import DomainPlan, LoraPlan, Plan
from fusion.report.report import AdapterReport, DomainReport, FusionReport, model_card


def report(lora: LoraPlan | None = None) -> FusionReport:
    names = ("signs", "digits")
    plan = Plan(
        lora=lora or LoraPlan(),
        confidence=0.95,
        domains=tuple(DomainPlan(name=name, source="made", question="what?", threshold=0.8) for name in names),
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
    format_scores = json.loads((tmp_path / "report.json").read_text())
    assert [(*step["domains"], step["into"], step["kept"], step["begin"]) for step in format_scores["timeline"]] == [
        ("signs", [], True, 0.0),
        ("digits", ["signs"], False, 2.0),
        ("digits", [], True, 4.0),
    ]
    assert format_scores["timeline"][1]["values"] == {"signs": 0.9, "digits": 0.9}
    assert format_scores["timeline"][1]["bounds"] == {"signs": 0.75, "digits": 0.75}
    assert format_scores["timeline"][1]["losses"] == [1.0, 0.5]
    assert format_scores["plan"]["training"]["patience"] is None


def test_an_adapters_card_has_its_scores_and_thresholds() -> None:
    made = report(LoraPlan(rank=4, rslora=True, targets=("q_proj", "v_proj"), vision=True))
    card = model_card(made, made.adapters[1])
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"base_model": "embedded", "library_name": "peft"}
    assert "| digits | classification | synthetic | accuracy | 0.800 | 0.900 | 0.850 | 0.880 | 500 |" in body
    assert "confidence 0.95" in body and "| signs |" not in body
    assert "rank-stabilised, on q_proj, v_proj of the language model and all of the vision side." in body
    missed = dataclasses.replace(made, domains=tuple(dataclasses.replace(d, met=False) for d in made.domains))
    assert "0.850 (missed)" in model_card(missed, missed.adapters[1])


def test_an_adapters_card_describes_its_training() -> None:
    made = report()
    both = AdapterReport("signs-digits", ("signs", "digits"), ("signs",), ("digits",))
    assert "Trained for at most 300 steps of 32 samples.\n" in model_card(made, made.adapters[0])
    card = model_card(made, both)
    assert "300 steps of 32 samples per domain, one after the other: signs, digits;\n50% of each batch" in card
    jointly = model_card(made, dataclasses.replace(both, together=("digits", "signs"), joined=()))
    assert "Trained on all of its domains at once, for at most 300 steps of 32 samples each." in jointly
    assert "of each batch" not in jointly
    guided = model_card(made, dataclasses.replace(both, together=("photos", "signs"), joined=("digits",)))
    assert "Trained on photos, signs at once, for at most 300 steps of 32 samples each." in guided
    assert "Of these, photos did not stay in the adapter.\nThen trained for at most" in guided
    assert "per domain: digits;\n50% of each batch" in guided


def test_an_adapters_card_describes_heads_that_train_by_themselves() -> None:
    made = report()
    boxes = dataclasses.replace(made, domains=(made.domains[0], dataclasses.replace(made.domains[1], task="detection")))
    alone = model_card(boxes, boxes.adapters[1])
    assert "by themselves, for at most 1500 steps of 128 samples each: digits.\nThe LoRA was not" in alone
    assert "300 steps" not in alone and "by themselves" not in model_card(boxes, boxes.adapters[0])
    both = AdapterReport("signs-digits", ("signs", "digits"), ("signs", "digits"), ())
    for history in (both, dataclasses.replace(both, together=("digits",), joined=("signs",))):
        card = model_card(boxes, history)
        assert "Trained for at most 300 steps of 32 samples.\nHeads that were trained by themselves" in card
    three = dataclasses.replace(both, domains=("signs", "digits", "photos"), together=("signs", "digits", "photos"))
    assert "Trained on signs, photos at once, for at most 300 steps of 32 samples each.\nHeads" in model_card(
        boxes, three
    )
    boxes.plan["lora"]["vision"] = True
    assert "by themselves" not in model_card(boxes, boxes.adapters[1])


def test_the_table_has_bounds_if_a_confidence_is_set_and_cuts_nothing() -> None:
    def shown(made: FusionReport) -> str:
        console = Console(width=60, file=io.StringIO())
        console.print(made.table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    made = report()
    one = dataclasses.replace(made, domains=made.domains[:1], adapters=made.adapters[:1], confidence=None)
    assert "2 domains in 2 adapters, 6 s" in shown(made) and "1 domain in 1 adapter, 6 s" in shown(one)
    assert "0.850" in shown(made) and "0.850" not in shown(one)
    assert "…" not in shown(made)
    assert made.in_words() == "accuracy in words, for domains with heads: signs 0.700, digits 0.700"
    wordless = dataclasses.replace(made, domains=tuple(dataclasses.replace(d, words=None) for d in made.domains))
    assert wordless.in_words() == ""


def test_scores_are_formatted_with_their_thresholds() -> None:
    thresholds = {"digits": 0.88}
    assert format_scores({"digits": Score(0.93, 0.93)}, thresholds) == "digits 0.930 (threshold 0.880)"
    assert (
        format_scores({"digits": Score(0.93, 0.912)}, thresholds) == "digits 0.930 (lower bound 0.912, threshold 0.880)"
    )
