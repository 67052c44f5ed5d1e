"""Which tests of the tiers that `make test` leaves out a change needs: `python -m tests.touched` prints their folders.

A change is what differs from the commit of the last full run of all tiers, which `full_run.json` names. First come the
folders of the changed packages and tests, then those of packages that may import them, the lowest levels first. What
all tests share, and a history without that commit, are a change of all packages.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.test_laws import MAY_IMPORT

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("full_run.json")
_ALSO = {
    "tests/simulated_cuda": {"atmm", "vlora.models", "vlora.lora", "vlora.memory", "vlora.engine"},
    "tests/qwen_vl": {"vlora.models"},
    "tests/hub": {"vlora.models", "vlora.server", "vlora.engine"},
    "tests/fusion": {"tools"},
}
"""Packages with tests in another folder than the one of their name."""
_SHARED = re.compile(r"Makefile|pyproject\.toml|vlora/__init__\.py|tests/(?!test_)\w+\.py")
"""Files that each test may depend on."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def changed_files() -> list[str]:
    """Files that differ from the last full run. If git does not tell, a file that all tests share is one of them."""
    base = json.loads(RECORD.read_text())["commit"]
    try:
        git("merge-base", "--is-ancestor", base, "HEAD")
        return git("diff", "--name-only", base).splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", str(error)).partition("\n")[0] or "it is not in the history"
        print(f"all packages count as changed since {base}, the last full run: {said}", file=sys.stderr)
        return ["Makefile"]


def folders_for(files: Iterable[str]) -> list[str]:
    """The folders of tests, and modules of tests outside of them, to run for changed files, most important first."""
    files = list(files)
    paths = [Path(file).with_suffix("").parts for file in files]
    tests = {"/".join(Path(file).parts[:2]) for file in files if file.startswith("tests/")}
    packages = {name for parts in paths for name in (".".join(parts[:2]), parts[0]) if name in MAY_IMPORT}
    packages |= {name for name in MAY_IMPORT if _folder(name) in tests}
    importers = {name for name, imported in MAY_IMPORT.items() if imported & packages}
    there = sorted(
        f"tests/{path.name}"
        for path in Path(__file__).parent.iterdir()
        if path.match("test_*.py") or (path / "__init__.py").exists()
    )
    if shared := any(map(_SHARED.fullmatch, files)):
        importers = set(MAY_IMPORT)
    found = [folder for folder, tested in _ALSO.items() if shared or folder in tests or tested & packages]
    found += [*map(_folder, sorted(packages)), *sorted(tests)]
    found += map(_folder, sorted(importers, key=lambda name: (len(MAY_IMPORT[name]), name)))
    found += there if shared else []
    return [each for each in dict.fromkeys(found) if each in there]


def _folder(package: str) -> str:
    return f"tests/{package.rpartition('.')[2]}"


def record(result: str) -> None:
    """Record a full run of all tiers on the present commit. result: the last line of pytest's output."""
    assert not git("status", "--porcelain", "--untracked-files=no"), "the run was not of a commit: files are changed"
    facts = {"commit": git("rev-parse", "HEAD").strip(), "date": str(datetime.date.today()), "result": result.strip()}
    RECORD.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2])
    else:
        print(*folders_for(changed_files()))
