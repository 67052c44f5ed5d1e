"""The build of the compiled CPU kernels: their cache, machines that share it, and plain torch without them."""

from __future__ import annotations

import functools
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import atmm
from atmm import Lane, SegmentPlan, cache, cpu, merge
from atmm.cpu.lanes import Compiled, Scattered
from atmm.tuning import tables
from tests.atmm import test_pointwise as pointwise
from tests.atmm import test_quantized as quantized
from tests.atmm.cases import check_against_reference, make_group, make_input, needs_compiler, segments
from tests.atmm.test_merge import rounded_as_torch_does
from vlora import tune
from vlora.errors import BadConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A separate cache folder, and no loaded library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    yield tmp_path
    cpu.library.cache_clear()


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def copying_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Instead of ten seconds of compiling, it copies the kernels that this process has loaded. $TARGET: its target."""
    built = next(each.path for each in psutil.Process().memory_maps() if Path(each.path).match("vlora/atmm-*.so"))
    lines = ("for output; do :; done", 'echo "$TARGET"', f'[ -c "$output" ] || cp {built} "$output"')
    return script(tmp_path_factory.mktemp("compiler") / "c++", *lines)


@needs_compiler
def test_machines_find_their_own_kernels_in_a_shared_home_folder(
    fresh: Path, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    def load(file: Path) -> Path:
        loaded.append(file)
        return file

    monkeypatch.setattr(cpu, "Library", load)
    monkeypatch.setenv("CXX", str(copying_compiler))
    times = []
    for target in ("theirs", "theirs", "ours", "theirs"):
        monkeypatch.setenv("TARGET", target)
        cpu.library.cache_clear()
        cpu.library()
        times.append(loaded[-1].stat().st_mtime_ns)
    theirs, again, ours, last = loaded
    assert theirs == again == last != ours and {theirs, ours} == set((fresh / "vlora").iterdir())
    assert times[0] == times[1] == times[3], "built again"
    assert stat.S_IMODE((fresh / "vlora").stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("older", ("x86-64", "x86-64-v3"))
def test_processors_without_wide_vectors_agree_with_the_reference(
    older: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler targets an older processor, without AVX-512 and perhaps without AVX."""
    replaced = f'[ "$word" = -march=native ] && word=-march={older}'
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    lines = (f'for word; do shift; {replaced}; set -- "$@" "$word"; done', f'exec {compiler} "$@"')
    monkeypatch.setenv("CXX", str(script(tmp_path / f"c++-{older}", *lines)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            group = make_group({"a": 3, "b": 8, "c": 17}, d_in=37, dtype=dtype)
            plan = SegmentPlan(17, [*segments({"a": 5, "b": 5, "c": 7}), Lane("a", 5, 17, -1.0)], "compiled")
            x, outputs = make_input(17, group, dtype)
            columns = [y.t().contiguous().t() for y in outputs]
            assert check_against_reference(group, plan, x, outputs) > 1
            assert check_against_reference(group, plan, x.t().contiguous().t(), columns) > 1
            assert all(isinstance(strategy, Scattered) for strategy in plan.prepared.values())
            pointwise.test_gates(7, 4865, dtype)
            pointwise.test_norms_of_sums(5, 100, dtype)
            pointwise.test_rotated_keys_are_written(5, 3, 1, 16, dtype)
        rounded_as_torch_does(merge)
        built = cpu.library()
        assert built is not None and built.has_int8 is (older == "x86-64-v3")
        if built.has_int8:
            for kind in quantized.GROUPED:
                quantized.test_products_with_scales_by_group(kind, torch.bfloat16)
            for d_out, d_in in ((24, 50), (7, 64), (3, 200)):
                quantized.test_products_with_scales_by_row(quantized.INT8, d_out, d_in, torch.float32)
            for num_tokens in (9, 17):
                quantized.test_integer_products_of_a_token_do_not_depend_on_the_others(num_tokens, 257)
    finally:
        cpu.library.cache_clear()


@needs_compiler
@torch.inference_mode()
def test_calls_that_were_recorded_are_repeated() -> None:
    """Without those of other threads. Operations of torch that write are noticed."""
    x, weight = torch.randn(2, 16), torch.ones(16)
    elsewhere = threading.Thread(target=atmm.rms_norm, args=(x.clone(), weight, 1e-6))
    with atmm.Tape() as tape:
        elsewhere.start()
        elsewhere.join()
        y = atmm.rms_norm(x.view(4, 8).flatten().unflatten(0, (2, 16)), weight, 1e-6)
    wanted = -y
    x.neg_()
    tape.repeat()
    assert torch.equal(y, wanted) and tape.complete and len(tape.calls) == 1
    for write in (lambda: x + 1, lambda: x.neg_(), lambda: x.t().flatten(), lambda: x.is_set_to(y)):
        with atmm.Tape() as other:
            write()
        assert not other.complete
    kernels = cpu.library()
    assert kernels is not None and not isinstance(kernels.normalize[x.dtype], functools.partial)


def test_a_tape_repeats_deltas_from_a_packed_copy() -> None:
    """Sites called one after the other, with a new view of their common input each time."""
    group, plan = make_group({"a": 4, "b": 8}), SegmentPlan(3, [Lane("a", 0, 2), Lane("b", 2, 3)], "compiled")
    group.pack("ab")
    x, outputs = make_input(3, group, torch.float32)
    with torch.inference_mode():
        atmm.add_delta(outputs[0], x, group.sites[0], plan)  # prepares the plan
        for y in outputs:
            y.zero_()
        with atmm.Tape() as tape:
            for site, y in zip(group.sites, outputs, strict=True):
                atmm.add_delta(y, x.view(3, -1), site, plan)
        wanted = [-y for y in outputs]
        x.neg_()
        for y in outputs:
            y.zero_()
        tape.repeat()
    assert tape.complete and all(map(torch.equal, outputs, wanted)) and all(y.any() for y in outputs)


@pytest.mark.parametrize(
    ("compiler", "words"),
    (("no-such-compiler", "no C++ compiler"), ("broken", "cannot find a target"), (None, "")),
)
def test_without_a_compiler_plain_torch_is_used(
    compiler: str | None, words: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged once, unless the environment disables the kernels."""
    if compiler is None:
        monkeypatch.setenv("ATMM_COMPILED", "0")
    else:
        failing = script(fresh / "broken", "echo 'cannot find a target' >&2", "exit 1")
        monkeypatch.setenv("CXX", str(failing) if compiler == "broken" else compiler)
    with caplog.at_level(logging.WARNING):  # visible at the default level
        assert cpu.library() is None and cpu.library() is None
    assert len(caplog.records) == (compiler is not None) and words in caplog.text
    assert not (fresh / "vlora").exists() or not list((fresh / "vlora").iterdir())
    group = make_group({"a": 8})
    group.pack("a")
    plan = SegmentPlan(2, [Lane("a", 0, 2)], "compiled")
    assert check_against_reference(group, plan, *make_input(2, group, torch.float32)) > 1
    assert not any(isinstance(strategy, Compiled) for strategy in plan.prepared.values())


# -- users without a writable cache folder ----------------------------------------------------------------------------


@pytest.fixture
def unwritable(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder is below a regular file, so that it cannot be created by any user."""
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file" / "cache"))
    return fresh / "file"


def test_users_without_a_home_folder(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in containers: no passwd entry and no HOME. Packaged tables are used."""

    def no_entry(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    tables.choose_table.cache_clear()
    with pytest.raises(FileNotFoundError, match="no home folder and XDG_CACHE_HOME is not set"):
        cache.folder()
    with pytest.raises(FileNotFoundError, match="no home folder and XDG_DATA_HOME is not set"):
        tables.user_folder()
    with pytest.raises(BadConfig, match="XDG_DATA_HOME is not set; set --out"):
        tune.tune([], device="cpu", dtypes=["float32"], minutes=0, out=None)
    with caplog.at_level(logging.WARNING):
        table = tables.choose_table("cpu", 1).table
    assert table is None or not table.from_user
    assert "skipped a folder of ATMM tables: this user has no home folder" in caplog.text


def test_kernels_are_compiled_in_a_temporary_folder_without_a_cache(
    unwritable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = script(unwritable.parent / "c++", "for output; do :; done", 'echo compiled >"$output"')
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
