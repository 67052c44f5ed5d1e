"""What a run keeps when it is interrupted, and with which option the same command goes on."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

UNFINISHED = "unfinished-"  # begins the name of each file and folder in a checkpoint that is still being written


class Kept:
    """The finished trainings of a run, counted on disk at the time of asking.

    Args:
        out: the run's folder.
        restart: the run deletes what an earlier one left there.
    """

    def __init__(self, out: Path, *, restart: bool) -> None:
        self._folder = out / "checkpoint"
        self._deletes = restart

    def begun(self) -> None:
        """Call once an earlier run's trainings are deleted: those found later are the run's own."""
        self._deletes = False

    @property
    def option(self) -> str:
        """What the command needs to go on: --resume, or --restart where it has not deleted anything yet."""
        return "--restart" if self._deletes else "--resume"

    def __str__(self) -> str:
        if self._deletes:
            return "nothing was deleted or trained yet"
        found = self._folder.glob("*/trained.json")
        count = sum(not file.parent.name.startswith(UNFINISHED) for file in found)
        if not count:
            return "no training was finished"
        return f"{count} finished training{'s' * (count > 1)} kept in {self._folder}"


def same_command(argv: Sequence[str], option: str) -> str:
    """A line for a shell that runs `vlora fuse` once more, with one of --resume and --restart.

    Args:
        argv: of this process, `sys.argv`.
        option: replaces either of the two.
    """
    program, *arguments = argv
    if Path(program).name == "__main__.py":
        command = [sys.executable, "-m", "vlora.cli"]
    else:
        name = Path(program).name
        command = [name if shutil.which(name) == program else program]
    left = [argument for argument in arguments if argument not in ("--resume", "--restart")]
    return shlex.join([*command, *left, option])
