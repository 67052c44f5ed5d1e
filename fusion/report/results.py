"""What a run leaves in its folder: adapters, test data and report, replaced together."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig

_REPORT = "report.json"  # removed first and put in place last: where it is, all beside it is of the same run
_NAMES = ("adapters", "test", "report.html", _REPORT)


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A folder to write all results into, which replace those in OUT when the block ends, and nothing if it raises."""
    staged = out / "results.unfinished"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    yield staged
    _remove(out / _REPORT)
    for name in _NAMES:
        _remove(out / name)
        (staged / name).rename(out / name)
    staged.rmdir()


def refuse_to_overwrite(out: Path) -> None:
    """Raises BadConfig where a run without --resume or --restart would delete what an earlier one has done."""
    trainings = len(list((out / "checkpoint").glob("*/trained.json")))
    report = out / _REPORT
    if report.exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.stat().st_mtime))
        raise BadConfig(
            f"{out} holds the results of a run that finished on {when}; take another folder, or give --restart to "
            "train everything again and replace them at the end, or --resume to write them again from its trainings"
        )
    if trainings:
        number = "1 finished training" if trainings == 1 else f"{trainings} finished trainings"
        raise BadConfig(
            f"{out} holds {number} of a run that was stopped; give --resume to go on with them, or --restart to delete "
            "them and begin again"
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
