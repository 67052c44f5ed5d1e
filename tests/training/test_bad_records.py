"""Records that cannot be used: refused before a training begins, or set aside while it goes on."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.beside import Case, adapter_of, losses_of, settle, states, submit
from vlora.errors import BadPlan
from vlora.models.processing import InputProcessor
from vlora.training import MicroStep, PackedTrainer, samples
from vlora.training.plan import read_plan
from vlora.training.record_order import RecordOrder
from vlora.training.records import MAX_NAMED, Record, Records
from vlora.types import TrainingStatus

TOO_LONG = 1100  # words; the model takes 1024 tokens
GOOD = [{"question": f"what is w{number}", "answer": f"w{number + 20}", "split": "train"} for number in range(9)]
BAD_IN_USE: list[dict[str, Any]] = [
    {"question": "what " * TOO_LONG, "answer": "w1", "split": "train"},
    {"question": "what ?", "answer": "w2", "image": "absent.png", "split": "train"},
    {"question": "what ?", "answer": "w3", "image": "broken.png", "split": "train"},
    {"question": "what is <image>", "answer": "w4", "split": "train"},
]
BAD_LINES = ['{"question": "what ?", "answer": NaN, "split": "train"}', '{"question": "what', '"text"']
STEPS, BATCH = 5, 4


def write(case: Case, name: str, lines: list[str | dict[str, Any]]) -> str:
    """A data file, beside a picture without pixels."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    (case.folder / name).write_text("".join(f"{text}\n" for text in texts))
    (case.folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return name


def mixed() -> list[str | dict[str, Any]]:
    """Good records and all kinds of others, by turns."""
    bad: list[str | dict[str, Any]] = [*BAD_IN_USE, *BAD_LINES]
    return [one for pair in zip(GOOD, [*bad, *GOOD[:2]], strict=True) for one in pair][: 2 * len(bad)] + GOOD[7:]


def plan(case: Case, results: str, data: str, **changes: Any) -> Path:
    fields = {"data": data, "steps": STEPS, "batch": BATCH, "bad_records": "skip", "micro_batch_tokens": 24}
    return case.plan(results, ["first"], **fields | changes)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Tokens of the samples of complete micro-steps, in their order."""
    found: list[list[int]] = []
    advance = MicroStep.advance
    begun: dict[int, list[list[int]]] = {}
    micro_step = PackedTrainer.micro_step

    def noted(trainer: PackedTrainer, samples: Any, **settings: Any) -> MicroStep:
        step = micro_step(trainer, samples, **settings)
        begun[id(step)] = [one.ids.tolist() for own in samples.values() for one in own]
        return step

    def advanced(step: MicroStep) -> bool:
        complete = advance(step)
        if complete:
            found.extend(begun.pop(id(step)))
        return complete

    monkeypatch.setattr(PackedTrainer, "micro_step", noted)
    monkeypatch.setattr(MicroStep, "advance", advanced)
    yield found


def expected(case: Case, lines: list[str | dict[str, Any]], count: int) -> list[list[int]]:
    """Tokens of the good records in the order of all that could be read."""
    processor = InputProcessor.from_pretrained(case.model)
    rows = [one for one in lines if isinstance(one, dict)]
    found: list[list[int]] = []
    for epoch in range(count):
        order = list(range(len(rows)))
        random.Random(f"0 {epoch}").shuffle(order)
        for row in (rows[place] for place in order):
            if row in GOOD:
                text = processor.chat(row["question"])
                answer = processor.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
                found.append([*processor.encode(text).prompt_ids, *answer, 2])
    return found[:count]


def test_bad_records_are_set_aside_and_named_once(
    case: Case, used: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """All others are used, in their order; every optimizer step has its whole batch."""
    lines = mixed()
    file = case.folder / write(case, "mixed.jsonl", lines)
    engine = case.engine(plan(case, "mixed", file.name))
    with caplog.at_level(logging.WARNING, "vlora.training"):
        settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert (status.state, status.step, status.num_bad) == ("finished", STEPS, 7)
    assert used == expected(case, lines, STEPS * BATCH)
    named = [f"{file}, line {2 * place + 2}: " for place in range(7)]
    assert len(status.bad) == 7 and all(any(one.startswith(place) for one in status.bad) for place in named)
    assert any("the model takes at most 1024, so shorten it" in one for one in status.bad)
    assert any("`answer` is nan; it must be text" in one for one in status.bad)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 7 and all(sum(place in one for one in logged) == 1 for place in named)
    assert not status.without_paths().bad, "they name files of the server"
    engine.close()


def test_a_training_with_bad_records_continues_with_the_same_bytes(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that closes leaves the checkpoint. Records that were set aside are not named again."""
    data = write(case, "again.jsonl", mixed())
    whole, cut = plan(case, "whole", data), plan(case, "cut", data)
    case.run(whole)
    engine = case.engine(cut)
    trainings = engine.parts.trainings
    settle(trainings, engine, until=lambda: trainings.statuses()[0].step == 3)
    before = trainings.statuses()[0]
    engine.close()
    assert before.state == "running" and before.num_bad == 7
    caplog.clear()
    (status,) = case.run(cut)
    assert (status.state, status.num_bad, sorted(status.bad)) == ("finished", 7, sorted(before.bad))
    assert not [one for one in caplog.records if "set aside" in one.getMessage() and "line 2:" in one.getMessage()]
    assert losses_of(case.folder / "cut" / "first") == losses_of(case.folder / "whole" / "first")
    found, wanted = (adapter_of(case.folder / one / "first") for one in ("cut", "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_record_after_an_abandoned_micro_step_is_not_passed_over() -> None:
    """Numbers of the order depend on what was set aside only: literal comparison with a filtered list."""
    for seed in range(20):
        drawn = random.Random(seed)
        records = Records(tuple(Record("q", str(n), None, f"line {n}") for n in range(7)), (), "")
        order = RecordOrder(records, seed, [], [])
        whole: list[int] = []
        for epoch in range(12):
            own = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(own)
            whole += own
        bad = set(drawn.sample(range(7), 3))
        first = 0
        found: list[int] = []
        while len(found) < 20:
            ahead = [next(order.usable(first))]
            while order.record(ahead[-1]).answer in map(str, bad):
                order.set_aside(ahead[-1])
                ahead = [next(order.usable(first))]
            if drawn.random() < 0.5:  # otherwise the micro-step was abandoned
                found.append(int(order.record(ahead[0]).answer))
                first = ahead[0] + 1
        assert found == [one for one in whole if one not in bad][:20]


def test_a_plan_names_bad_records_before_its_training_begins(case: Case) -> None:
    """File and line of each. Negative control: the same plan begins with `skip`, and without those records."""
    rows: list[str | dict[str, Any]] = [*GOOD[:2], *BAD_IN_USE]
    rows = [one for one in rows if not isinstance(one, dict) or one.get("image") != "absent.png"]
    file = case.folder / write(case, "strict.jsonl", rows)
    engine = case.engine()
    with pytest.raises(BadPlan) as found:
        submit(engine, plan(case, "strict", file.name, bad_records="refuse"))
    long, broken, marker, remedy = str(found.value).splitlines()
    assert long == f"{file}, line 3: it has 1104 tokens; the model takes at most 1024, so shorten it"
    assert broken.startswith(f"{file}, line 4: {case.folder / 'broken.png'} is not a valid picture (JPEG, PNG, ")
    assert marker == f"{file}, line 5: its text has 1 image markers; remove them"
    assert remedy == "mend these records, or set `bad_records: skip` to leave them out"
    assert not states(engine)
    again = engine.parts.trainings.submit(str(case.folder / "strict.yaml"), reopen=False)  # as after a restart
    while not again.done():
        engine.parts.trainings.advance()
    assert again.result()[0].state == "running", "an engine that starts again does not wait for a check"
    engine.parts.trainings.cancel("first")
    write(case, "clean.jsonl", [*GOOD])
    submit(engine, plan(case, "clean", "clean.jsonl", bad_records="refuse"))
    assert states(engine) == {"first": "running"}
    engine.close()


def test_the_check_of_a_plan_ends_after_some_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training begins; a record that was not checked fails it later."""
    monkeypatch.setattr("vlora.training.samples.CHECK_S", -1.0)
    file = case.folder / write(case, "unchecked.jsonl", [*GOOD, BAD_IN_USE[0]])
    engine = case.engine()
    submit(engine, plan(case, "unchecked", file.name, bad_records="refuse", batch=10))
    settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert status.state == "failed" and status.error is not None and status.error.startswith(f"{file}, line 10: ")
    engine.close()


def test_a_plan_names_the_bad_records_of_all_its_trainings(case: Case) -> None:
    """Once each, though two trainings use the same file."""
    file = case.folder / write(case, "one.jsonl", [*GOOD, BAD_IN_USE[0]])
    other = case.folder / write(case, "other.jsonl", [*GOOD, BAD_IN_USE[3]])
    written = case.plan("all", ["first", "second"], data=file.name)
    entries = yaml.safe_load(written.read_text())
    entries["trainings"] += [entries["trainings"][0] | {"name": "third", "data": other.name}]
    written.write_text(yaml.safe_dump(entries))
    engine = case.engine()
    with pytest.raises(BadPlan) as found:
        submit(engine, written)
    named = str(found.value).splitlines()
    assert [line.partition(": ")[0] for line in named[:-1]] == [f"{file}, line 10", f"{other}, line 10"]
    engine.close()


def test_lines_that_are_no_records_are_errors_of_the_plan(case: Case) -> None:
    rows: list[str | dict[str, Any]] = [*GOOD, *BAD_LINES, BAD_IN_USE[1]]
    file = case.folder / write(case, "lines.jsonl", rows)
    (case.folder / "lines.jsonl").write_bytes(file.read_bytes() + b'{"question": "\xff"}\n')
    with pytest.raises(BadPlan) as found:
        read_plan(plan(case, "lines", file.name, bad_records="refuse"))
    named = str(found.value).splitlines()
    assert len(named) == 5 and all(f"{file}, line {10 + place}: " in one for place, one in enumerate(named))
    assert named[-1].endswith("line 14: is not UTF-8 text")
    ((_, records),) = read_plan(plan(case, "lines", file.name))[1]
    assert (len(records.train), records.num_bad) == (10, 4), "pictures are looked for when they are used"


def test_a_picture_that_cannot_be_decoded_fails_a_strict_training(case: Case) -> None:
    """The check before the start reads headers only. Submitted again with `skip`, it continues from its checkpoint."""
    shutil.copy(next((case.folder / "data").glob("*.png")), case.folder / "cut.png")
    whole = (case.folder / "cut.png").read_bytes()
    (case.folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    file = case.folder / write(case, "cut.jsonl", [*GOOD, {**GOOD[0], "image": "cut.png"}])
    engine = case.engine(plan(case, "picture", file.name, bad_records="refuse", batch=2, steps=10))
    settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert status.state == "failed" and status.error is not None
    assert status.error.startswith(f"{file}, line 10: {case.folder / 'cut.png'} is not a valid picture")
    assert status.error.endswith("(or set `bad_records: skip`, and submit the plan again)")
    submit(engine, plan(case, "picture", file.name, batch=2, steps=10))
    settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert (status.state, status.step, status.num_bad) == ("finished", 10, 1)
    engine.close()


def run(case: Case, results: str, lines: list[str | dict[str, Any]]) -> TrainingStatus:
    (status,) = case.run(plan(case, results, write(case, f"{results}.jsonl", lines)))
    return status


def test_a_training_of_mostly_bad_records_ends_with_the_first_reason(case: Case) -> None:
    """Negative control: with as many good ones it ends well."""
    bad: list[str | dict[str, Any]] = [
        {"question": "what ?", "answer": "w2", "image": f"absent{number}.png", "split": "train"} for number in range(6)
    ]
    failed = run(case, "mostly", [*bad, *GOOD[:4]])
    assert failed.state == "failed" and failed.error is not None and failed.num_bad == 6
    assert failed.error.startswith("6 of its 10 records cannot be used, the first one: ")
    assert "there is no file" in failed.error
    assert run(case, "half", [*bad[:4], *GOOD[:4]]).state == "finished"
    with pytest.raises(BadPlan, match="line 1: `answer` is nan"):
        run(case, "lines only", [*BAD_LINES, GOOD[0]])


def test_held_out_records_that_are_all_bad_leave_no_evaluation(case: Case) -> None:
    held: list[str | dict[str, Any]] = [{**BAD_IN_USE[place], "split": "validation"} for place in (0, 1)]
    status = run(case, "held", [*GOOD, *held])
    assert (status.state, status.num_bad) == ("finished", 2)
    assert (status.held_out_before, status.held_out_after) == (None, None)
    status = run(case, "some", [*GOOD, *held, {**GOOD[0], "split": "validation"}])
    assert status.num_bad == 2 and status.held_out_before is not None and status.held_out_after is not None


def test_few_tracebacks_are_logged(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of errors that no record should have; each of the records has its line."""
    prepare = samples.prepare

    def broken(processor: InputProcessor, record: Record) -> samples.Prepared:
        if record.question.startswith("broken"):
            raise ValueError("an error of the tokenizer")
        return prepare(processor, record)

    monkeypatch.setattr(samples, "prepare", broken)
    status = run(case, "tracebacks", [*GOOD, *({**GOOD[0], "question": f"broken {n}"} for n in range(9))])
    assert (status.state, status.num_bad) == ("finished", 9)
    found = [one for one in caplog.records if "broken" in one.getMessage() or "tokenizer" in one.getMessage()]
    assert len(found) == 9 and sum(one.exc_info is not None for one in caplog.records) == 4


def test_many_bad_records_are_counted_and_few_are_named(case: Case) -> None:
    bad: list[str | dict[str, Any]] = [
        {"question": "what ?", "answer": "w2", "image": f"absent{number}.png", "split": "train"} for number in range(20)
    ]
    more: list[str | dict[str, Any]] = [{**GOOD[0], "question": f"what is w{number}"} for number in range(40)]
    data = write(case, "many.jsonl", [*bad, *more])
    (status,) = case.run(plan(case, "many", data, steps=10, batch=6, micro_batch_tokens=200))
    assert (status.state, status.num_bad, len(status.bad)) == ("finished", 20, MAX_NAMED)
