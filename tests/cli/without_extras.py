"""The `vlora` command as in an installation without some packages: their modules cannot be found.

Run as `python -m tests.cli.without_extras EXTRA` with a JSON list of commands, each a list of arguments, on stdin;
EXTRA is installed in addition to the client: one of `vlora.cli.extras.EXTRAS`, or `nothing`.
Prints the exit code, stdout and stderr of each as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
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


def run(command: list[str]) -> tuple[int, str, str]:
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    sys.argv = ["vlora", *command]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            vlora.cli.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()  # type: ignore[attr-defined]


if __name__ == "__main__":
    own = EXTRAS.get(sys.argv[1], {}).values()
    others = (
        EXTRAS["demo"].values(),
        EXTRAS["plans"].values(),
        ("triton", "starlette", "markupsafe", "matplotlib", "ray", "mcp", "opentelemetry"),
    )
    hide({module for each in others for module in each} - set(own))
    print(json.dumps([run(command) for command in json.load(sys.stdin)]))
