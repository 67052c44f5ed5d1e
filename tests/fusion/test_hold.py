"""A run's folder belongs to one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.training.run_lock import held
from vlora.errors import BadConfig

_HOLD = """
import sys
from pathlib import Path
from fusion.training.run_lock import held
with held(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_who_comes_second_is_told_who_was_first(tmp_path: Path) -> None:
    told = rf"out is in use by process {os.getpid()} on .* since 20"
    with held(tmp_path / "out"):
        with pytest.raises(BadConfig, match=told), held(tmp_path / "out"):
            pass
        with held(tmp_path / "another"):
            pass
    with held(tmp_path / "out"):
        pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(BadConfig, match=rf"^{tmp_path}/file\S* cannot be created: .*; choose"), held(folder):
            pass


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(BadConfig, match=f"in use by process {other.pid} "), held(tmp_path):
            pass
        other.kill()
        other.wait()
        with held(tmp_path):
            pass
