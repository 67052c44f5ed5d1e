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
        ("tests/cluster/test_user_ray.py", "tests/cluster", "tests/server"),
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


@pytest.mark.parametrize("git", ["whole", "without the base", "no program"])
def test_all_counts_as_changed_where_git_does_not_tell(
    git: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    run("init", "-q")
    for file in ("first", "second"):
        (tmp_path / file).write_text("")
        run("add", file)
        run("commit", "-q", "-m", file)
    base = "0" * 39 + "1" if git == "without the base" else run("rev-parse", "HEAD~1")
    (tmp_path / "full_run.json").write_text(json.dumps({"commit": base}))
    monkeypatch.setattr(touched, "RECORD", tmp_path / "full_run.json")
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    if git == "no program":
        monkeypatch.setenv("PATH", str(tmp_path))
    files, said = touched.changed_files(), capsys.readouterr().err
    if git == "whole":
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
