"""If files cannot be cached, the engine starts nevertheless, and its log names the environment variable to set.

The cache folder of these tests is below a regular file, so that it cannot be created by any user.
"""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atmm import cache, cpu, matmul
from atmm.tuning import matmul_choice, tables
from atmm.tuning.matmul_choice import Contention
from tests.atmm.test_cpu import copying_compiler as copying_compiler  # a fixture
from tests.atmm.test_cpu import fresh as fresh
from tests.atmm.test_cpu import needs_compiler
from vlora import tune
from vlora.errors import BadConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unwritable(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file" / "cache"))
    return fresh / "file"


@pytest.fixture
def without_home(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a passwd entry and without HOME, as in containers."""

    def no_entry(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    tables.choose_table.cache_clear()


def test_a_user_without_a_home_folder_has_no_cache_folder(without_home: None) -> None:
    with pytest.raises(FileNotFoundError, match="no home folder and XDG_CACHE_HOME is not set"):
        cache.folder()
    with pytest.raises(FileNotFoundError, match="no home folder and XDG_DATA_HOME is not set"):
        tables.user_folder()
    with pytest.raises(BadConfig, match="XDG_DATA_HOME is not set; set --out"):
        tune.tune([], device="cpu", dtypes=["float32"], minutes=0, out=None)


def test_a_user_without_a_home_folder_uses_packaged_tables(
    without_home: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        table = tables.choose_table("cpu", 1).table
    assert table is None or not table.from_user
    assert "skipped a folder of ATMM tables: this user has no home folder" in caplog.text


@needs_compiler
@pytest.mark.usefixtures("unwritable")
def test_measured_products_are_used_without_a_cache_folder(
    copying_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setattr(matmul, "measured", {})
    monkeypatch.setattr(matmul_choice, "LARGE", 1)
    monkeypatch.setattr(matmul_choice, "MEASURED_ROWS", (1,))
    monkeypatch.setattr(matmul_choice, "library", lambda: None)
    monkeypatch.setattr(Contention, "disturbs", lambda self: False)
    with caplog.at_level(logging.WARNING):
        matmul_choice.measure([torch.zeros(8, 4)])
    assert len(matmul.measured) == 1
    message = caplog.records[-1].getMessage()
    assert message.startswith("matrix products are measured at every start: the result cannot be cached: ")
    assert message.endswith("set XDG_CACHE_HOME to a writable folder")


def test_kernels_are_compiled_in_a_temporary_folder_without_a_cache(
    unwritable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Writes its output at once, instead of seconds of compiling.
    compiler = unwritable.parent / "c++"
    compiler.write_text('#!/bin/sh\nfor output; do :; done\necho compiled >"$output"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    loaded: list[Path] = []

    def load(file: Path) -> Path:
        assert file.is_file()
        loaded.append(file)
        return file

    monkeypatch.setattr(cpu, "Library", load)
    with caplog.at_level(logging.WARNING):
        assert cpu.library() is not None
    (record,) = caplog.records
    assert str(unwritable) in record.getMessage() and "set XDG_CACHE_HOME" in record.getMessage()
    assert not loaded[0].exists() and unwritable not in loaded[0].parents

    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable.parent / "cache"))
    cpu.library.cache_clear()
    caplog.clear()
    assert cpu.library() is not None and not caplog.records
    assert loaded[1].exists() and loaded[1].parent == unwritable.parent / "cache" / "vlora"


@needs_compiler
@pytest.mark.slow
def test_a_process_without_a_home_folder_uses_compiled_kernels(copying_compiler: Path) -> None:
    code = (
        "import os, pwd\n"
        "def no_entry(user): raise KeyError(user)\n"
        "pwd.getpwuid = no_entry\n"
        "import atmm\n"
        "print(atmm.load_kernels() is not None)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith("XDG_")}
    environment["CXX"] = str(copying_compiler)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n", done.stderr
    assert "XDG_CACHE_HOME is not set; they are compiled at every start" in done.stderr
