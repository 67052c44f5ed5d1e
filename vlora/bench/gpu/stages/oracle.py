"""The oracle tests on the device: every family and mode against transformers + PEFT, kernels against float64.

They run in pytest with TF32 off everywhere, which would exceed their tolerance in float32.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from vlora.bench.gpu.context import Context
from vlora.bench.gpu.runner import ROOT

_FILES = (
    "tests/atmm/test_merge.py",
    "tests/atmm/test_add_delta.py",
    "tests/engine/test_answers.py::test_lora",
    "tests/engine/test_answers.py::test_without_a_part_answers_are_wrong",
    "tests/engine/test_answers.py::test_in_bfloat16_every_mode_is_as_close_to_float32_as_unmerged",
    "tests/engine/test_heads.py",
    "tests/engine/test_reuse.py",
    "tests/engine/test_switching.py",
)
_SMALL_TESTS = ("tests/engine/test_answers.py::test_lora[lora-unmerged-llava]",)
_WORKERS = 8
_MOST_FAILURES = 20
_RESERVE_S = 5.0


def run(context: Context) -> dict[str, Any]:
    """Run the tests marked `gpu` on the device."""
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            raise RuntimeError(f"{module} is not installed; pip install {module}, or leave out the stage oracle")
    if not (ROOT / "tests").is_dir():
        raise RuntimeError(f"{ROOT} has no tests; run from a checkout")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        exit_code, output = _pytest(context, report)
        found = _counts(report) if report.exists() else {"tests": 0, "failed": []}
    context.keep(found)
    if exit_code is None:
        raise TimeoutError(f"the tests did not end in time; {output[-2000:]}")
    if exit_code or not found["passed"]:
        raise RuntimeError(f"pytest ended with exit code {exit_code}: {output[-2000:]}")
    return found | {"summary": f"{found['passed']} passed, {found['skipped']} skipped"}


def _pytest(context: Context, report: Path) -> tuple[int | None, str]:
    """Exit code (None: not in time) and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["--maxfail", str(_MOST_FAILURES), "-m", "gpu", "--device", context.device.type, "--tb", "short"]
    if not context.on_gpu:
        command += ["-p", "no:xdist"]
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    command += _FILES if context.on_gpu else _SMALL_TESTS
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(1.0, context.left_s - _RESERVE_S),
        )
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or b""
        return None, partial.decode(errors="replace") if isinstance(partial, bytes) else partial
    return done.returncode, done.stdout


def _counts(report: Path) -> dict[str, Any]:
    """Numbers of tests, and the failed ones with the ends of their messages."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = []
    skipped = 0
    for case in cases:
        skipped += case.find("skipped") is not None
        for kind in ("failure", "error"):
            problem = case.find(kind)
            if problem is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                failed.append({"test": name, "message": (problem.text or problem.get("message") or "")[-800:]})
    return {
        "tests": len(cases),
        "passed": len(cases) - skipped - len({each["test"] for each in failed}),
        "skipped": skipped,
        "failed": failed,
    }
