"""The `vlora` command as in an installation without some packages: their modules cannot be found.

Run as `python -m tests.cli.without_extras EXTRA ARGUMENT...`; EXTRA is installed in addition to the client: one of
`vlora.cli.extras.EXTRAS`, or `nothing`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import vlora.cli
from vlora.cli.extras import EXTRAS


def hide(modules: set[str]) -> None:
    """Hide the modules of these top-level packages from the import system."""

    class Finder(PathFinder):
        @classmethod
        def find_spec(
            cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            """As PathFinder, for the other modules."""
            if fullname.partition(".")[0] in modules:
                return None
            return super().find_spec(fullname, path, target)

    sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]


if __name__ == "__main__":
    extra, *sys.argv[1:] = sys.argv[1:]
    every = {
        "triton",
        "starlette",
        "markupsafe",
        "matplotlib",
        *EXTRAS["demo"].values(),
        *EXTRAS["plans"].values(),
        "ray",
    }
    hide(every - set(EXTRAS.get(extra, {}).values()))
    vlora.cli.main()
