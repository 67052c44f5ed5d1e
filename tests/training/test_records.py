"""Records of a training: which are held out, and those that cannot be used: refused at its start, or set aside."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.beside import Case, assert_same, losses_of
from vlora.config import Token
from vlora.errors import BadPlan
from vlora.models.processing import InputProcessor
from vlora.plan_files.errors import PlanErrors, PlanText
from vlora.server.security.public_errors import shown_to
from vlora.training import samples
from vlora.training.micro_step import MicroStep
from vlora.training.plan import read_plan
from vlora.training.records import MAX_NAMED, Record, RecordOrder, Records, read_records
from vlora.training.trainer import PackedTrainer
from vlora.types import TrainingStatus

Row = str | dict[str, Any]


def read(folder: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Records:
    if rows is not None:
        (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    errors = PlanErrors(PlanText())
    found = read_records(folder, None, **{"held_out": 0.25, "seed": 0, **settings}, errors=errors)
    errors.raise_if_any()
    return found


ROWS = [{"question": "what ?", "answer": f"{number}", "group": f"g{number // 4}"} for number in range(40)]


def test_a_share_of_whole_groups_or_the_given_part_is_held_out(tmp_path: Path) -> None:
    found = read(tmp_path, ROWS)
    held, trained = ({int(record.answer) // 4 for record in part} for part in (found.held_out, found.train))
    assert len(found.held_out) in (8, 12) and len(found.train) + len(found.held_out) == 40
    assert held.isdisjoint(trained) and read(tmp_path) == found
    assert read(tmp_path, seed=1).held_out != found.held_out and read(tmp_path, held_out=0.0).held_out == ()
    file = tmp_path / "questions.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert read(tmp_path).train == found.train, "a byte order mark and Windows' line ends make no difference"
    assert read(tmp_path, [*ROWS[:-1], {**ROWS[-1], "answer": "other"}]).digest != found.digest
    regrouped = read(tmp_path, [{**row, "group": f"g{number % 10}"} for number, row in enumerate(ROWS)])
    assert regrouped.held_out != found.held_out and regrouped.digest != found.digest
    one_group = read(tmp_path, ROWS[:4], held_out=0.9)
    assert len(one_group.train) == 4 and not one_group.held_out
    parts = ("train", "validation", "test", "train")
    given = read(tmp_path, [{**row, "split": parts[place % 4]} for place, row in enumerate(ROWS)])
    assert (len(given.train), len(given.held_out)) == (20, 10)
    with pytest.raises(BadPlan, match="some rows have a `split`, others do not"):
        read(tmp_path, [{**ROWS[0], "split": "train"}, *ROWS[1:]])


# -- records that cannot be used ---------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"question": f"what is w{number}", "answer": f"w{number + 20}", "split": "train"} for number in range(9)
]
BAD_IN_USE: list[dict[str, Any]] = [
    {"question": "what " * 1100, "answer": "w1", "split": "train"},  # the model takes 1024 tokens
    {"question": "what ?", "answer": "w2", "image": "absent.png", "split": "train"},
    {"question": "what ?", "answer": "w3", "image": "broken.png", "split": "train"},
    {"question": "what is <image>", "answer": "w4", "split": "train"},
]
BAD_LINES = ['{"question": "what ?", "answer": NaN, "split": "train"}', '{"question": "what', '"text"']
BAD: list[Row] = [*BAD_IN_USE, *BAD_LINES]
MIXED = [one for pair in zip(GOOD, [*BAD, *GOOD[:2]], strict=True) for one in pair][: 2 * len(BAD)] + GOOD[7:]
STEPS, BATCH = 5, 4


def absent(count: int) -> list[Row]:
    return [{**BAD_IN_USE[1], "image": f"absent{number}.png"} for number in range(count)]


def write(case: Case, name: str, lines: list[Row]) -> Path:
    """A data file, beside a picture without pixels."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    (case.folder / name).write_text("".join(f"{text}\n" for text in texts))
    (case.folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return case.folder / name


def plan(case: Case, results: str, lines: list[Row], **changes: Any) -> Path:
    """A plan with its data in a file of its name."""
    data = write(case, f"{results}.jsonl", lines).name
    fields = {"data": data, "steps": STEPS, "batch": BATCH, "bad_records": "skip", "micro_batch_tokens": 24}
    return case.plan(results, ["first"], **fields | changes)


def run(case: Case, results: str, lines: list[Row], **changes: Any) -> TrainingStatus:
    (status,) = case.run(plan(case, results, lines, **changes))
    return status


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Tokens of the samples of complete micro-steps, in their order."""
    found: list[list[int]] = []
    begun: dict[int, list[list[int]]] = {}
    advance, micro_step = MicroStep.advance, PackedTrainer.micro_step

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


def expected(case: Case, lines: list[Row], count: int) -> list[list[int]]:
    """Tokens of the good records in the order of all that could be read."""
    processor = InputProcessor.from_pretrained(case.model)
    rows = [one for one in lines if isinstance(one, dict)]
    found: list[list[int]] = []
    for epoch in range(count):
        order = list(range(len(rows)))
        random.Random(f"0 {epoch}").shuffle(order)
        for row in (rows[place] for place in order if rows[place] in GOOD):
            text = processor.chat(row["question"])
            answer = processor.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
            found.append([*processor.encode(text).prompt_ids, *answer, 2])
    return found[:count]


def test_bad_records_are_set_aside_and_named_once(
    case: Case, used: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """All others are used, in their order; every optimizer step has its whole batch. A training that was cut continues
    with the same bytes, and names none again."""
    with caplog.at_level(logging.WARNING, "vlora.training"):
        status = run(case, "mixed", MIXED)
    file = case.folder / "mixed.jsonl"
    assert (status.state, status.step, status.num_bad) == ("finished", STEPS, 7)
    assert used == expected(case, MIXED, STEPS * BATCH)
    named = [f"{file}, line {2 * place + 2}: " for place in range(7)]
    assert len(status.bad) == 7 and all(any(one.startswith(place) for one in status.bad) for place in named)
    assert any("the model takes at most 1024, so shorten it" in one for one in status.bad)
    assert any("`answer` is nan; it must be text" in one for one in status.bad)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 7 and all(sum(place in one for one in logged) == 1 for place in named)
    user = Token(name="user", secret="x" * 16)
    assert not shown_to(status, user).bad, "they name files of the server"
    cut = plan(case, "cut", MIXED)
    with case.running(cut) as on:
        on.settle(until_step=3)
        before = on.status
    assert before.state == "running" and before.num_bad == 7
    caplog.clear()
    (status,) = case.run(cut)
    assert (status.state, status.num_bad, sorted(status.bad)) == ("finished", 7, sorted(before.bad))
    assert not [one for one in caplog.records if "set aside" in one.getMessage() and "line 2:" in one.getMessage()]
    whole, found = case.folder / "mixed" / "first", case.folder / "cut" / "first"
    assert losses_of(found) == losses_of(whole)
    assert_same(found, whole)


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
            ahead = next(order.usable(first))
            while order.record(ahead).answer in map(str, bad):
                order.set_aside(ahead)
                ahead = next(order.usable(first))
            if drawn.random() < 0.5:  # otherwise the micro-step was abandoned
                found.append(int(order.record(ahead).answer))
                first = ahead + 1
        assert found == [one for one in whole if one not in bad][:20]


def test_a_plan_names_bad_records_before_its_training_begins(case: Case) -> None:
    """File and line of each. Negative control: the same plan begins without a check, and without those records."""
    rows: list[Row] = [*GOOD[:2], *(one for one in BAD_IN_USE if one.get("image") != "absent.png")]
    strict, file = plan(case, "strict", rows, bad_records="refuse"), case.folder / "strict.jsonl"
    with case.running() as on:
        with pytest.raises(BadPlan) as found:
            on.submit(strict)
        long, broken, marker, remedy = str(found.value).splitlines()
        assert long == f"{file}, line 3: it has 1104 tokens; the model takes at most 1024, so shorten it"
        assert broken.startswith(f"{file}, line 4: {case.folder / 'broken.png'} is not a valid picture (JPEG, PNG, ")
        assert marker == f"{file}, line 5: its text has 1 image markers; remove them"
        assert remedy == "mend these records, or set `bad_records: skip` to leave them out"
        assert not on.states()
        assert on.submit(strict, reopen=False)[0].state == "running", "as after a restart, which waits for no check"
        on.trainings.cancel("first")
        assert on.submit(plan(case, "clean", [*GOOD], bad_records="refuse"))[0].state == "running"
        # Of all trainings of a plan, once each, though two of them use the same file.
        one, other = (
            write(case, "one.jsonl", [*GOOD, BAD_IN_USE[0]]),
            write(case, "other.jsonl", [*GOOD, BAD_IN_USE[3]]),
        )
        written = case.plan("all", ["first", "second"], data=one.name)
        entries = yaml.safe_load(written.read_text())
        entries["trainings"] += [entries["trainings"][0] | {"name": "third", "data": other.name}]
        written.write_text(yaml.safe_dump(entries))
        with pytest.raises(BadPlan) as found:
            on.submit(written)
        named = str(found.value).splitlines()
        assert [line.partition(": ")[0] for line in named[:-1]] == [f"{one}, line 10", f"{other}, line 10"]


def test_lines_that_are_no_records_are_errors_of_the_plan(case: Case) -> None:
    rows: list[Row] = [*GOOD, *BAD_LINES, BAD_IN_USE[1]]
    strict, skips = plan(case, "lines", rows, bad_records="refuse"), plan(case, "lines2", rows)
    for name in ("lines", "lines2"):
        file = case.folder / f"{name}.jsonl"
        file.write_bytes(file.read_bytes() + b'{"question": "\xff"}\n')
    with pytest.raises(BadPlan) as found:
        read_plan(strict)
    named = str(found.value).splitlines()
    places = [f"{case.folder / 'lines.jsonl'}, line {10 + place}: " for place in range(5)]
    assert len(named) == 5 and all(place in one for place, one in zip(places, named, strict=True))
    assert named[-1].endswith("line 14: is not UTF-8 text")
    ((_, records),) = read_plan(skips)[1]
    assert (len(records.train), records.num_bad) == (10, 4), "pictures are looked for when they are used"
    for row in ("[" * 100_000, json.dumps({"question": "q", "answer": list(range(100_000))})):
        with pytest.raises(BadPlan, match=r"odd\.jsonl, line 1: ") as found:
            read_plan(plan(case, "odd", [row], bad_records="refuse"))
        assert len(str(found.value)) < 1000


def test_a_record_that_the_check_cannot_find_fails_a_strict_training(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reads headers only, for some time. Submitted again with `skip`, it continues from its checkpoint."""
    shutil.copy(next((case.folder / "data").glob("*.png")), case.folder / "cut.png")
    whole = (case.folder / "cut.png").read_bytes()
    (case.folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows: list[Row] = [*GOOD, {**GOOD[0], "image": "cut.png"}]
    file = case.folder / "picture.jsonl"
    with case.running(plan(case, "picture", rows, bad_records="refuse", batch=2, steps=10)) as on:
        on.settle()
        assert on.status.state == "failed" and on.status.error is not None
        assert on.status.error.startswith(f"{file}, line 10: {case.folder / 'cut.png'} is not a valid picture")
        assert on.status.error.endswith("(or set `bad_records: skip`, and submit the plan again)")
        on.submit(plan(case, "picture", rows, batch=2, steps=10))
        on.settle()
        assert (on.status.state, on.status.step, on.status.num_bad) == ("finished", 10, 1)
    monkeypatch.setattr("vlora.training.samples.CHECK_S", -1.0)
    failed = run(case, "unchecked", [*GOOD, BAD_IN_USE[0]], bad_records="refuse", batch=10)
    assert failed.state == "failed" and str(failed.error).startswith(f"{case.folder / 'unchecked.jsonl'}, line 10: ")


def test_a_training_of_mostly_bad_records_ends_with_the_first_reason(case: Case) -> None:
    """Negative control: with as many good ones it ends well. Many are counted, and few are named."""
    failed = run(case, "mostly", [*absent(6), *GOOD[:4]])
    assert failed.state == "failed" and failed.error is not None and failed.num_bad == 6
    assert failed.error.startswith("6 of its 10 records cannot be used, the first one: ")
    assert "there is no file" in failed.error
    assert run(case, "half", [*absent(4), *GOOD[:4]]).state == "finished"
    with pytest.raises(BadPlan, match="line 1: `answer` is nan"):
        run(case, "lines only", [*BAD_LINES, GOOD[0]])
    more: list[Row] = [{**GOOD[0], "question": f"what is w{number}"} for number in range(40)]
    status = run(case, "many", [*absent(20), *more], steps=10, batch=6, micro_batch_tokens=200)
    assert (status.state, status.num_bad, len(status.bad)) == ("finished", 20, MAX_NAMED)


def test_held_out_records_that_are_all_bad_leave_no_evaluation(case: Case) -> None:
    held: list[Row] = [{**BAD_IN_USE[place], "split": "validation"} for place in (0, 1)]
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
