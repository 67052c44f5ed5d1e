"""Check that the suite notes real faults: `python -m tests.mutants [NAME ...]` applies each to a copy and runs tests.

A mutant is a patch of this folder: text that says what is wrong in it and for whom, a line `tests: FOLDER ...`, and a
unified diff. A tier catches a mutant if a test of these folders fails. Exit code 1: a mutant survived.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TIERS = {
    "test-fast": ("-m", "not slow"),
    "test": (),
    "test-all": ("--exhaustive",),
    "test-gpu-sim": ("--gpu-sim", "--exhaustive", "-m", "gpu_sim"),
}
"""The commands of the Makefile, fastest first, with their options of pytest."""


class Mutant(NamedTuple):
    """A fault put into the product.

    Attributes:
        path: The patch.
        fault: What is wrong.
        tests: Folders or files of tests, one of which fails.
    """

    path: Path
    fault: str
    tests: tuple[str, ...]


def read(path: Path) -> Mutant:
    """Read a mutant. Raises ValueError if the patch names no tests, or tests that do not exist."""
    head = path.read_text().partition("\ndiff --git")[0]
    fault, _, rest = head.partition("\ntests: ")
    tests = tuple(rest.split())
    if missing := [name for name in tests if not (ROOT / name).exists()] or (not tests and ["no line `tests:`"]):
        raise ValueError(f"{path.name}: {', '.join(missing)}")
    return Mutant(path, " ".join(fault.split()), tests)


def mutants() -> list[Mutant]:
    return [read(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]


def applies(mutant: Mutant, *, root: Path = ROOT, check: bool = False) -> bool:
    """Apply a patch to a copy of the repository, or only check that it applies."""
    command = ["git", "apply", *(["--check"] if check else []), str(mutant.path)]
    return subprocess.run(command, cwd=root, check=False, capture_output=True).returncode == 0


def caught_by(mutant: Mutant, copy: Path, tiers: list[str]) -> str:
    """The first of the tiers that catches a mutant, with the test that failed first; empty if it survives all."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}
    for tier in tiers:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *TIERS[tier], *mutant.tests]
        done = subprocess.run(command, cwd=copy, env=environment, check=False, capture_output=True, text=True)
        if done.returncode == 1:  # a test failed; other codes are errors of the command, and 5 is no test
            failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "?")
            return f"{tier}: {failed.partition(' - ')[0].split(' ', 1)[-1]}"
        if done.returncode not in (0, 5):
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants; all without any")
    parser.add_argument("--tier", choices=TIERS, action="append", help="tiers in order; default: test-fast, test")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not options.names or mutant.path.stem in options.names]
    survived: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for mutant in chosen:
            copy = Path(folder) / mutant.path.stem
            subprocess.run(["git", "worktree", "add", "--detach", "--quiet", copy], cwd=ROOT, check=True)
            try:
                if not applies(mutant, root=copy):
                    raise RuntimeError(f"{mutant.path.name} does not apply to the last commit")
                started = time.monotonic()
                caught = caught_by(mutant, copy, options.tier or ["test-fast", "test"])
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)
            survived += [] if caught else [mutant.path.stem]
            print(f"{mutant.path.stem:32} {caught or 'SURVIVED'} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught; survived: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
