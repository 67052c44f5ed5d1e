"""Results in a folder belong to one run, and are never deleted without --restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusion.commands import fuse
from fusion.report import results
from fusion.report.results import refuse_to_overwrite, replace_results
from vlora.errors import BadConfig


def write(folder: Path, content: str) -> None:
    for name in ("adapters/signs", "test/signs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(content)
    for name in ("report.html", "report.json"):
        (folder / name).write_text(content)


def found(out: Path) -> set[str]:
    return {file.read_text() for file in out.rglob("*") if file.is_file()}


def test_results_replace_those_of_an_earlier_run(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with replace_results(tmp_path) as folder:
            write(folder, content)
            assert found(tmp_path) >= {content}
        assert found(tmp_path) == {content}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "report.html", "report.json", "test"]


def test_results_that_cannot_be_written_replace_nothing(tmp_path: Path) -> None:
    write(tmp_path, "first")
    with pytest.raises(OSError, match="disk full"), replace_results(tmp_path) as folder:
        (folder / "adapters").mkdir()
        raise OSError("disk full")
    assert all((tmp_path / name).exists() for name in ("adapters/signs/file", "test/signs/file", "report.html"))
    with replace_results(tmp_path) as folder:
        write(folder, "second")
    assert found(tmp_path) == {"second"}


def test_an_interrupted_replacement_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed in the middle of replacing."""
    write(tmp_path, "first")
    removed: list[str] = []

    def interrupted(path: Path, remove: Callable[[Path], None] = results.remove) -> None:
        removed.append(path.name)
        if removed[-1] == "test":
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(results, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), replace_results(tmp_path) as folder:
        write(folder, "second")
    assert not (tmp_path / "report.json").exists()


def test_an_earlier_run_is_deleted_only_with_restart(tmp_path: Path) -> None:
    refuse_to_overwrite(tmp_path / "none")
    refuse_to_overwrite(tmp_path)
    for number, words in ((1, "1 finished training of"), (2, "2 finished trainings of")):
        (tmp_path / "checkpoint" / str(number)).mkdir(parents=True)
        (tmp_path / "checkpoint" / str(number) / "trained.json").write_text("{}")
        with pytest.raises(BadConfig, match=rf"{words} a run that was stopped; give --resume .* --restart"):
            refuse_to_overwrite(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(BadConfig, match=r"results of a run that finished on 20.*--restart to train everything again"):
        refuse_to_overwrite(tmp_path)


def test_the_folder_is_checked_before_the_plans_data(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text("domains:\n  - {name: a, source: /nowhere, question: q, threshold: 0.5}\n")
    write(out, "first")
    with pytest.raises(BadConfig, match="results of a run that finished"):
        fuse(plan, out)
    with pytest.raises(BadConfig, match="only one of the two"):
        fuse(plan, out, resume=True, restart=True)
    assert found(out) >= {"first"}
