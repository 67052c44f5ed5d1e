"""`vlora stream plan.yaml`: its check, its output, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vlora
from tests.video_files import write_video

PLAN = """
cameras:
  - name: gate
    source: gate.mp4
    tasks:
      - {head: cam/day, rate: 2}
    events:
      - {name: sun, when: {head: cam/day, label: bright}, ask: {question: "say:sunny", max_tokens: 8}}
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    write_video(tmp_path / "gate.mp4", [20, 230])
    (tmp_path / "plan.yaml").write_text(PLAN.strip() + "\n")
    return str(tmp_path / "plan.yaml")


def test_a_plan_prints_answers_and_events(vlora_command: Vlora, address: str, plan: str, tmp_path: Path) -> None:
    code, out, err = vlora_command("stream", plan, "--server", address, "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line.partition("s ")[2].split()[0] for line in lines if "event" not in line] == ["dark"] * 2 + [
        "bright"
    ] * 2
    assert [line for line in lines if "event" in line] == ["gate event sun 1.0 s bright: sunny"]
    assert len((tmp_path / "out" / "gate.day.jsonl").read_text().splitlines()) == 4
    code, out, _ = vlora_command("stream", plan, "--server", address, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and sorted(row["start_s"] for row in rows) == [0.0, 0.5, 1.0, 1.0, 1.5]


def test_the_check_of_a_plan_needs_no_server(vlora_command: Vlora, plan: str) -> None:
    code, out, err = vlora_command("stream", plan, "--check", "--server", "127.0.0.1:1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "1 camera: 2 answers per second, 2 of heads; 1 event in addition"
    code, out, _ = vlora_command("stream", plan, "--check", "--json")
    assert code == 0 and json.loads(out)["heads_per_s"] == 2.0
    Path(plan).write_text(PLAN.strip().replace("rate", "rates"))
    code, out, err = vlora_command("stream", plan, "--check")
    field = "line 5, field `cameras[0].tasks[0].rates`"
    assert (code, out, err) == (2, "", f"error: {plan}, {field}: is not a known field; check its spelling\n")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--head", "cam/day"], "--head is for sources without a plan; write it into the plan"),
        (["--max-tokens", "5"], "--max-tokens is for sources without a plan; write it into the plan"),
        (["0"], "a plan has its own cameras; give one plan and no other source"),
    ],
)
def test_options_of_a_plan_are_in_the_plan(vlora_command: Vlora, plan: str, more: list[str], error: str) -> None:
    assert vlora_command("stream", plan, *more) == (2, "", f"error: {error}\n")


def test_a_check_without_a_plan_is_refused(vlora_command: Vlora) -> None:
    code, _, err = vlora_command("stream", "gate.mp4", "--head", "cam/day", "--check")
    assert (code, err) == (2, "error: --check is for a plan; give a .yaml file, or remove --check\n")


def test_a_plan_with_a_head_that_the_server_lacks(vlora_command: Vlora, address: str, plan: str) -> None:
    Path(plan).write_text(PLAN.strip().replace("cam/day", "cam/noon"))
    code, out, err = vlora_command("stream", plan, "--server", address)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "line 5, field `cameras[0].tasks[0].head`: adapter 'cam' has no head 'noon'; its heads: night, day" in err
