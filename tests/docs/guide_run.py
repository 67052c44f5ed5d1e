"""Runs a guide as a reader does: every snippet, in order, in one shell, with this checkout's commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.docs.test_api_guide import ROOT, script


def run_guide(guide: str, folder: Path, log: str, variables: dict[str, str] | None = None) -> str:
    """What the snippets of `docs/GUIDE` print.

    Args:
        guide: The file's name.
        folder: An empty folder, in which the snippets run.
        log: The file in it to which the guide's server writes, shown when the run fails.
        variables: Of the environment.
    """
    commands = folder / "bin"
    commands.mkdir()
    for name, module in (("vlora", "-m vlora.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }
    process = subprocess.Popen(
        ["bash", "-c", script((ROOT / "docs" / guide).read_text()) + "\n"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # servers of a run that failed
    assert process.returncode == 0, f"{errors}\n{printed}\n{(folder / log).read_text()}"
    return printed
