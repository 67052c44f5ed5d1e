"""docs/split.md as run by a reader: every snippet, in order, with base executors of the package's own model."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_api_guide import ROOT, script

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("bash") is None, reason="the guide uses bash")
def test_every_snippet_runs(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("vlora", "-m vlora.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    text = (ROOT / "docs" / "split.md").read_text()
    command = ["bash", "-c", script(text) + "\n"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # executors of a run that failed
    assert process.returncode == 0, f"{errors}\n{printed}\n{(tmp_path / 'base.log').read_text()}"
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    (apart,) = re.findall(r"apart by (\S+)", printed)
    assert 0 < float(apart) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
