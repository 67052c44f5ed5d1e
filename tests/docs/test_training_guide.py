"""docs/training.md as run by a reader: every snippet, in order, with the package's own model."""

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

from tests.docs.test_api_guide import ROOT, free_port, script

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("bash") is None, reason="the guide uses bash")
def test_every_snippet_runs(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("vlora", "-m vlora.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    port = free_port()
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "VLORA_SERVER": f"127.0.0.1:{port}",
        "VLORA_SERVE_RPYC_PORT": str(port),
    }
    text = (ROOT / "docs" / "training.md").read_text()
    process = subprocess.Popen(
        ["bash", "-c", script(text) + "\n"],
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
            os.killpg(process.pid, signal.SIGKILL)  # the server of a run that failed
    assert process.returncode == 0, f"{errors}\n{printed}\n{(tmp_path / 'serve.log').read_text()}"
    finished = re.findall(
        r"^signs  finished  step 30 of 30  loss ([\d.]+)  held out before ([\d.]+), after", printed, re.M
    )
    assert finished and float(finished[0][0]) < float(finished[0][1])
    assert "adapter_model.safetensors" in printed
    assert re.search(r"^more  running  step 0 of 1000", printed, re.M)
    assert re.search(r"^more  cancelled  step \d+ of 1000", printed, re.M)
