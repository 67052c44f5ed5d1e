"""The folder of a run: its results, which are replaced together, and its trainings; files of others stay."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlora.errors import BadConfig
from vlora.run_folder import UNFINISHED, NotWritten, remove, writing

_REPORT = "report.json"  # removed first and written last: if it exists, all other results are of the same run
_NAMES = ("adapters", "test", "report.html", _REPORT)
_STAGED = "results.unfinished"
_REPLACED = "replaced.json"  # in the staged results: the report of the results that they replace
# Names of files and folders in a run's other folders.
_TRAININGS = rf"packing\.json|[0-9a-f]{{24}}|{UNFINISHED}.*"
_FEATURES = rf"[0-9a-f]{{24}}-[0-9a-f]{{32}}\.safetensors|[0-9a-f]{{64}}\.(safetensors|\d+)|{UNFINISHED}.*"


@contextlib.contextmanager
def replace_results(out: Path) -> Iterator[Path]:
    """A folder for new results, which replace those in OUT when the block ends; if it raises, OUT does not change.

    Raises BadConfig if OUT contains files in their place that no run wrote.
    """
    refuse_foreign(out)
    staged = out / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with writing(staged, only_disks=True):
            staged.mkdir(parents=True)
            yield staged
    except NotWritten:
        shutil.rmtree(staged, ignore_errors=True)  # a part would keep the disk full
        raise
    if (out / _REPORT).exists():
        (out / _REPORT).rename(staged / _REPLACED)
    for name in _NAMES:
        remove(out / name)
        (staged / name).rename(out / name)
    shutil.rmtree(staged)


def former_adapters(out: Path) -> dict[str, tuple[str, ...]]:
    """The domains of the adapters of an earlier run in OUT, by their names."""
    return {one["name"]: tuple(one.get("domains", ())) for report in _reports(out)[:1] for one in report["adapters"]}


def refuse_foreign(out: Path) -> None:
    """Raise BadConfig if a run would delete something in OUT that no run wrote. Its reports name what it wrote."""
    reports = _reports(out)

    def named(key: str) -> str:
        return "|".join(re.escape(one["name"]) for report in reports for one in report[key])

    found = [
        *_others(out / "checkpoint", _TRAININGS),
        *_others(out / "features", _FEATURES),
        *_others(out / "adapters", named("adapters")),
        *_others(out / "test", named("domains")),
        *_others(out / _STAGED, "|".join(map(re.escape, (*_NAMES, _REPLACED)))),
        *(name for name in ("report.html", _REPORT) if not reports and (out / name).exists()),
    ]
    if found:
        raise BadConfig(
            f"{out} contains {', '.join(found)}, which `vlora fuse` did not write and would delete; choose another "
            f"folder, or move {'it' if len(found) == 1 else 'them'}"
        )


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


def _reports(out: Path) -> list[dict[str, Any]]:
    """The reports of earlier runs in OUT, of which a run that was killed may have left several; other files do not
    count."""
    found = []
    for file in (out / _REPORT, out / _STAGED / _REPORT, out / _STAGED / _REPLACED):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            report = json.loads(file.read_bytes())
            if all(isinstance(one["name"], str) for key in ("adapters", "domains") for one in report[key]):
                found.append(report)
    return found


def _others(folder: Path, own: str) -> list[str]:
    """The folder, with a file as evidence, if it contains names that no run writes. own: a pattern of those it does."""
    if folder.exists() and not folder.is_dir():
        return [folder.name]
    names = sorted(entry.name for entry in folder.glob("*"))
    others = [name for name in names if not re.fullmatch(own, name)]
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{folder.name}/ ({others[0]}{more})"] if others else []


class ResumeHint:
    """The finished trainings of a run, counted on disk on each access.

    Args:
        restart: the run deletes the trainings of an earlier run.
    """

    def __init__(self, out: Path, *, restart: bool) -> None:
        self._folder = out / "checkpoint"
        self._deletes = restart

    def mark_cleared(self) -> None:
        """Record that the trainings of an earlier run are deleted; those found later are this run's own."""
        self._deletes = False

    @property
    def option(self) -> str:
        """The option with which to continue: --resume, or --restart if nothing has been deleted yet."""
        return "--restart" if self._deletes else "--resume"

    def __str__(self) -> str:
        if self._deletes:
            return "no training was deleted or run yet"
        found = self._folder.glob("*/trained.json")
        count = sum(not file.parent.name.startswith(UNFINISHED) for file in found)
        if not count:
            return "no training was finished"
        return f"{count} finished training{'s' * (count > 1)} kept in {self._folder}"


def same_command(argv: Sequence[str], option: str) -> str:
    """A shell command that runs `vlora fuse` again with either --resume or --restart.

    Args:
        argv: `sys.argv` of this process.
        option: replaces either option in it.
    """
    program, *arguments = argv
    if Path(program).name == "__main__.py":
        command = [sys.executable, "-m", "vlora.cli"]
    else:
        name = Path(program).name
        command = [name if shutil.which(name) == program else program]
    left = [argument for argument in arguments if argument not in ("--resume", "--restart")]
    return shlex.join([*command, *left, option])
