"""A run's folder belongs to one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlora.errors import BadConfig
from vlora.plan_files.run_lock import lock_folder

_HOLD = """
import sys
from pathlib import Path
from vlora.plan_files.run_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    message = rf"out is in use by process {os.getpid()} on .* since 20"
    with lock_folder(tmp_path / "out"):
        with pytest.raises(BadConfig, match=message), lock_folder(tmp_path / "out"):
            pass
        with lock_folder(tmp_path / "another"):
            pass
    with lock_folder(tmp_path / "out"):
        pass


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(BadConfig, match=rf"^{tmp_path}/file\S* cannot be created: .*; choose"), lock_folder(folder):
            pass


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(BadConfig, match=f"in use by process {other.pid} "), lock_folder(tmp_path):
            pass
        other.kill()
        other.wait()
        with lock_folder(tmp_path):
            pass
