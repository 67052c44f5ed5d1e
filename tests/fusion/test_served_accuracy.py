"""The accuracy that `vlora fuse` reports for a Qwen base is that of its adapters in `vlora serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fusion.mixed_plan import served_scores, write_mixed_plan
from tests.server.served import ROOT, served
from vlora.models import InputProcessor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # several processes, each with its own imports


def start_fuse(plan: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlora.cli", "fuse", str(plan), "--out", str(out), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def num_trained(out: Path) -> int:
    return len(list((out / "checkpoint").glob("*/trained.json")))


def assert_served_as_reported(plan: Path, out: Path, *learned: str) -> dict[str, Any]:
    """Serve the run's adapters and compare the scores of all test samples; return the report. learned: domains that
    score above 0."""
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    with served("--model", str(plan.parent / "base"), "--adapters", str(out / "adapters"), "--dtype", "float32") as on:
        scores = served_scores(on.client, plan, report)
    reported = {one["name"]: (one["after"], one["words"]) for one in report["domains"]}
    assert scores == {name: pytest.approx(both) for name, both in reported.items()}
    assert all(reported[name][0] > 0 for name in learned), reported
    assert any(0 < after < 1 for after, _ in reported.values()), "the comparison shows nothing if all are right"
    return report


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"])
def test_a_qwen_base_serves_with_the_reported_accuracy(tmp_path: Path, family: str) -> None:
    plan, out = write_mixed_plan(tmp_path / "plan", family), tmp_path / "out"
    finish(start_fuse(plan, out))
    report = assert_served_as_reported(plan, out, "colors", "words", "squares")
    assert {one["task"] for one in report["domains"]} == {"classification", "vqa", "detection"}


@pytest.mark.exhaustive
def test_activated_adapters_serve_with_the_reported_accuracy(tmp_path: Path) -> None:
    lora = "rank: 4, activated: true"
    plan, out = write_mixed_plan(tmp_path / "plan", "qwen2_5_vl", lora=lora), tmp_path / "out"
    finish(start_fuse(plan, out))
    report = assert_served_as_reported(plan, out, "colors", "words")  # a grid reads hidden states of the base model
    tokenizer = InputProcessor.from_pretrained(str(plan.parent / "base")).tokenizer
    for adapter in report["adapters"]:
        config = json.loads((out / "adapters" / adapter["name"] / "adapter_config.json").read_text())
        assert tokenizer.decode(config["alora_invocation_tokens"]) == "answer", "what the template adds"


@pytest.mark.exhaustive
def test_a_killed_run_on_a_qwen_base_resumes_to_the_same_adapters(tmp_path: Path) -> None:
    plan = write_mixed_plan(tmp_path / "plan", "qwen2_5_vl", steps=12)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    finish(start_fuse(plan, whole))
    process = start_fuse(plan, out)
    while not num_trained(out):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert 0 < num_trained(out) < num_trained(whole)
    assert "training colors into a new adapter" not in finish(start_fuse(plan, out, "--resume"))
    for file in (whole / "adapters").rglob("*.safetensors"):
        assert file.read_bytes() == (out / "adapters" / file.relative_to(whole / "adapters")).read_bytes()
