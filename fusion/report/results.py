"""A run's results in its folder: adapters, test data and report, replaced together."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig

_REPORT = "report.json"  # removed first and written last: if it exists, all other results are of the same run
_NAMES = ("adapters", "test", "report.html", _REPORT)


@contextlib.contextmanager
def replace_results(out: Path) -> Iterator[Path]:
    """A folder for new results, which replace those in OUT when the block ends; if it raises, OUT does not change."""
    staged = out / "results.unfinished"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    yield staged
    remove(out / _REPORT)
    for name in _NAMES:
        remove(out / name)
        (staged / name).rename(out / name)
    staged.rmdir()


def refuse_to_overwrite(out: Path) -> None:
    """Raise BadConfig if a run without --resume or --restart would delete the work of an earlier run."""
    trainings = len(list((out / "checkpoint").glob("*/trained.json")))
    report = out / _REPORT
    if report.exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.stat().st_mtime))
        raise BadConfig(
            f"{out} contains the results of a run that finished on {when}; choose another folder, or give --restart to "
            "train everything again and replace them at the end, or --resume to rewrite them from its trainings"
        )
    if trainings:
        number = "1 finished training" if trainings == 1 else f"{trainings} finished trainings"
        raise BadConfig(
            f"{out} contains {number} of a run that was stopped; give --resume to continue with them, or --restart to "
            "delete them and start over"
        )


def remove(path: Path) -> None:
    """Delete a folder or a file, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
