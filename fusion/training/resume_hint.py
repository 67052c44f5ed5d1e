"""The trainings that an interrupted run keeps, and the option with which the same command continues."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

UNFINISHED = "unfinished-"  # prefix of files and folders in a checkpoint that are still being written


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
            return "nothing was deleted or trained yet"
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
