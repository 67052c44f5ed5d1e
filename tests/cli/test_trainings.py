"""`vlora train` and `vlora serve --train`: commands, and plans that are refused with their lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vlora

RECORD = json.dumps({"question": "what ?", "answer": "a sign"})


def test_trainings_are_submitted_listed_and_cancelled(
    vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    at = ("--server", address)
    assert vlora_command("train", "status", *at) == (0, "no trainings\n", "")
    assert vlora_command("train", "submit", "signs", *at) == (0, "signs  running  step 1 of 2  loss 0.5000\n", "")
    code, out, _ = vlora_command("train", "status", "--json", *at)
    assert code == 0 and json.loads(out)["state"] == "running"
    assert vlora_command("train", "cancel", "signs", *at)[:2] == (
        0,
        "signs  cancelled  step 1 of 2  loss 0.5000\n",
    )
    code, _, err = vlora_command("train", "cancel", "absent", *at)
    assert code == 2 and err == "error: no training named 'absent' is running; running: signs\n"
    code, _, err = vlora_command("train", "submit", "bad", *at)
    assert code == 2 and err == f"error: {tmp_path}/bad: cannot be read: No such file or directory\n"


def test_records_that_were_set_aside_are_shown(
    vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vlora_command("train", "submit", "spoiled", "--server", address)[1].splitlines() == [
        "spoiled  running  step 1 of 2  loss 0.5000  3 records set aside",
        "  set aside: a.jsonl, line 2: bad",
        "  set aside: a.jsonl, line 5: bad",
        "  and 1 more",
    ]


@pytest.mark.parametrize(
    ("plan", "data", "message"),
    [
        (None, RECORD, "{plan}: cannot be read: No such file or directory"),
        ("trainings: []", RECORD, "{plan}, line 1, field `folder`: is missing"),
        (
            "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 0",
            RECORD,
            "{plan}, line 5, field `trainings[0].steps`:",
        ),
        (
            "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 2\n  ranks: 4",
            RECORD,
            "{plan}, line 6, field `trainings[0].ranks`:",
        ),
        (
            "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 2",
            '{"question": "what ?"}',
            "{plan}, line 4, field `trainings[0].data`: {data}, line 1: `answer` is null; it must be text",
        ),
        (
            "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 2",
            RECORD + "\n{",
            "{plan}, line 4, field `trainings[0].data`: {data}, line 2: not JSON:",
        ),
        (
            "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 2",
            RECORD.replace("}", ', "image": "a.png"}'),
            "{plan}, line 4, field `trainings[0].data`: {data}, line 1: `image` is 'a.png'; there is no such file in",
        ),
        (
            "folder: out\ntrainings:\n- {name: a, data: d.jsonl, steps: 2}\n- {name: a, data: d.jsonl, steps: 2}",
            RECORD,
            "{plan}, line 2, field `trainings`: several trainings are named a",
        ),
    ],
    ids=["no file", "no folder", "no steps", "unknown field", "no answer", "no JSON", "no image", "one name twice"],
)
def test_a_bad_plan_is_refused_with_its_line(
    vlora_command: Vlora, tmp_path: Path, plan: str | None, data: str, message: str
) -> None:
    file = tmp_path / "plan.yaml"
    (tmp_path / "d.jsonl").write_text(data + "\n")
    if plan is not None:
        file.write_text(plan + "\n")
    code, out, err = vlora_command("serve", "--train", str(file), "--rpyc-port", "0")
    assert (code, out) == (2, "") and err.count("\n") <= 2
    assert err.startswith("error: " + message.format(plan=file, data=tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("folder: out\nadapters: []", "{plan}, line 2, field `adapters`:"),
        ("folder: out\nadapters:\n- name: signs", "{plan}, line 3, field `adapters[0].training`: is missing"),
        (
            "folder: out\nadapters:\n- {name: signs, training: {steps: 2}, max_share: 0}",
            "{plan}, line 3, field `adapters[0].max_share`:",
        ),
        (
            "folder: out\nadapters:\n- name: signs\n  training: {steps: 2}\n  trusted: absent.jsonl",
            "{plan}, line 5, field `adapters[0].trusted`: {folder}/absent.jsonl cannot be read: No such file",
        ),
    ],
    ids=["no adapter", "no training", "no share", "no records"],
)
def test_a_bad_learning_plan_is_refused_with_its_line(
    vlora_command: Vlora, tmp_path: Path, plan: str, message: str
) -> None:
    file = tmp_path / "learn.yaml"
    file.write_text(plan + "\n")
    code, out, err = vlora_command("serve", "--learn", str(file), "--rpyc-port", "0")
    assert (code, out) == (2, "") and err.startswith("error: " + message.format(plan=file, folder=tmp_path))


def test_a_promise_below_one_is_refused(vlora_command: Vlora) -> None:
    code, _, err = vlora_command("serve", "--train-slowdown", "0.9")
    assert code == 2 and err.startswith("error: train_slowdown is 0.9; it must be above 1")
