"""Files of the paths that a user gives, in folders too, with one error for each path that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from vlora.errors import BadImage, listed


def find_files(
    given: str | Path,
    suffixes: Collection[str],
    lacks: str,
    on_error: Callable[[BadImage], None],
    say: Callable[[str], None],
) -> list[Path]:
    """The given file, or the files of the given folder and its folders with one of the suffixes, in order of name.

    Args:
        lacks: in messages, what a folder without such a file lacks, such as "no picture".
        on_error: called with the error of each folder inside that cannot be read; the others are still searched.
        say: called once with the names of the files that have another suffix, without hidden ones.

    Raises:
        BadImage: the path does not exist or cannot be read, or the folder contains no such file.
    """
    path = Path(given)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadImage(f"no file or folder {str(given)!r}") from error
    except OSError as error:
        raise BadImage(f"cannot read {str(given)!r}: {error.strerror}") from error
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise BadImage(f"no file or folder {str(given)!r}")
    unreadable: list[OSError] = []
    files = [Path(folder, name) for folder, _, names in os.walk(path, onerror=unreadable.append) for name in names]
    found = sorted(file for file in files if file.suffix.lower() in suffixes and _is_file(file))
    errors = [BadImage(f"cannot read folder {each.filename!r}: {each.strerror}") for each in unreadable]
    if not found:
        raise errors[0] if errors else BadImage(f"folder {str(given)!r} contains {lacks}")
    for problem in errors:
        on_error(problem)
    skipped = {file.name for file in files if file.suffix.lower() not in suffixes and not file.name.startswith(".")}
    if skipped:
        say(f"folder {str(given)!r}: skipped {listed(skipped)}; only files ending in {', '.join(suffixes)} are read")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the error is reported when the file is read
        return True
