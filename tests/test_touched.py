"""The folders of tests that a change needs follow from the import law."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, touched


@pytest.mark.parametrize(
    ("file", "first", "among"),
    [
        ("atmm/triton/kernels.py", "tests/simulated_cuda", "tests/engine"),
        ("tests/atmm/test_triton.py", "tests/simulated_cuda", "tests/atmm"),
        ("tests/qwen_vl/test_adapters.py", "tests/qwen_vl", None),
        ("vlora/models/families.py", "tests/simulated_cuda", "tests/qwen_vl"),
        ("vlora/routing/router.py", "tests/routing", "tests/cluster"),
        ("vlora/config.py", "tests/wire", "tests/server"),
        ("apps/streams.py", "tests/apps", "tests/cli"),
        ("tests/cluster/nodes/test_joining.py", "tests/cluster", "tests/server"),
        ("tests/docs/test_guides.py", "tests/docs", None),
        ("tests/test_gpu_tests.py", "tests/test_gpu_tests.py", None),
        ("tests/full_run.json", None, None),
        ("docs/gpu.md", None, None),
    ],
)
def test_a_change_needs_the_tests_of_its_package_and_of_those_above(
    file: str, first: str | None, among: str | None
) -> None:
    folders = touched.folders_for([file])
    assert folders[:1] == ([first] if first else []) and (among is None or among in folders)


@pytest.mark.parametrize(
    "file",
    ["tests/conftest.py", "tests/oracle.py", "tests/harness.py", "tests/families.py", "pyproject.toml", "Makefile"],
)
def test_a_change_of_what_all_tests_share_needs_all_folders(file: str) -> None:
    folders = touched.folders_for([file, "vlora/routing/router.py"])
    first = folders[: folders.index("tests/routing")]
    assert first[:1] == ["tests/simulated_cuda"] and "tests/cluster" not in first
    assert {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")} <= {
        folder.removeprefix("tests/") for folder in folders
    }
    assert len(folders) == len(set(folders))


@pytest.mark.parametrize(
    "clone", ["whole", "shallow", "without the base", "of another user", "no repository", "no git"]
)
def test_all_counts_as_changed_where_git_does_not_tell(
    clone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()

    def commit(file: str) -> str:
        (origin / file).write_text("")
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", file)):
            subprocess.run(["git", *arguments], cwd=origin, check=True)
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=origin, check=True, capture_output=True, text=True)
        return found.stdout.strip()

    base = commit("first")
    commit("second")
    root = origin
    if clone == "shallow":
        root = tmp_path / "shallow"
        subprocess.run(["git", "clone", "-q", "--depth", "1", origin.as_uri(), root], check=True)
    elif clone == "without the base":
        base = "0" * 39 + "1"
    elif clone == "of another user":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    elif clone == "no repository":
        root = tmp_path
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    elif clone == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "full_run.json").write_text(json.dumps({"commit": base}))
    monkeypatch.setattr(touched, "RECORD", tmp_path / "full_run.json")
    monkeypatch.setattr(touched, "ROOT", root)
    files, said = touched.changed_files(), capsys.readouterr().err
    if clone == "whole":
        assert files == ["second"] and not said
    else:
        assert touched.folders_for(files) == touched.folders_for(["pyproject.toml"])
        assert said.startswith(f"all packages count as changed since {base}") and said.count("\n") == 1


def test_the_bound_of_a_run_counts_from_the_first_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the start of collecting."""
    item = SimpleNamespace(config=SimpleNamespace(stash=pytest.Stash(), option=SimpleNamespace(stop_after=150.0)))
    start_s, skipped = time.monotonic(), []
    for after_s in (1_000.0, 1_149.0, 1_151.0):
        monkeypatch.setattr(time, "monotonic", lambda now_s=start_s + after_s: now_s)
        try:
            conftest.pytest_runtest_setup(item)  # type: ignore[arg-type]
        except pytest.skip.Exception:
            skipped.append(after_s)
    assert skipped == [1_151.0]
