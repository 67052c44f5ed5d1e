"""The oracle tests on the device: every family and mode against transformers + PEFT, kernels against float64.

They run in pytest with TF32 off everywhere, which would exceed their tolerance in float32.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from vlora.bench.gpu.context import Context
from vlora.bench.harness import ROOT

_FILES = (
    "tests/atmm/test_merge.py",
    "tests/atmm/test_add_delta.py",
    "tests/engine/test_answers.py::test_lora",
    "tests/engine/test_answers.py::test_without_a_part_answers_are_wrong",
    "tests/engine/test_answers.py::test_in_bfloat16_every_mode_is_as_close_to_float32_as_unmerged",
    "tests/engine/test_heads.py",
    "tests/engine/test_quantized_answers.py",
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
    exit_code, output = _pytest(context)
    found = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    context.keep(found)
    if exit_code is None:
        raise TimeoutError(f"the tests did not end in time; {output[-2000:]}")
    if exit_code or not found.get("passed"):
        raise RuntimeError(f"pytest ended with exit code {exit_code}: {output[-2000:]}")
    return found | {"summary": f"{found['passed']} passed, {found.get('skipped', 0)} skipped"}


def _pytest(context: Context) -> tuple[int | None, str]:
    """Exit code (None: not in time) and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
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
