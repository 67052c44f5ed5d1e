"""Guides as run by a reader: every snippet, in order, in one shell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.core_size import ROOT
from tests.docs.forking import commands
from tests.processes import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("bash", "curl", "openssl"))), reason="the guides use bash, curl and openssl"
    ),
]
SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(text: str) -> str:
    """All snippets; each prints its number first, and the first failure ends the run."""
    lines = ["set -e"]
    for number, match in enumerate(SNIPPET.finditer(text), 1):
        kind, code = match.groups()
        assert kind in ("bash", "python"), f"snippet {number} is {kind}: it cannot be run"
        lines.append(f"echo '## {number}' >&2")
        lines.append(code if kind == "bash" else f"python <<'PYTHON'\n{code}PYTHON")
    return "\n".join(lines)


class Ran(NamedTuple):
    """What the snippets printed, and the log of their server."""

    printed: str
    log: str


def real(folder: Path) -> Path:
    """A folder with this checkout's `vlora` and `python`."""
    (programs := folder / "bin").mkdir()
    for name, of in (("vlora", "-m vlora.cli"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {of} "$@"\n')
        (programs / name).chmod(0o755)
    return programs


def ran(text: str, folder: Path, programs: Path, log: str = "serve.log", **variables: str) -> Ran:
    """Run the snippets of a text in a folder, with the programs of another folder."""
    path, python = f"{programs}:{os.environ['PATH']}", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", **variables}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ["bash", "-c", script(text) + "\n"]
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)
    try:
        printed, errors = process.communicate(timeout=280)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # servers of a run that failed
    found = (folder / log).read_text() if (folder / log).exists() else "no server was started"
    assert process.returncode == 0, f"{errors}\n{printed}\n{found}"
    return Ran(printed, found)


def guide(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_quickstart_the_guide_and_the_api_page_are_one_session(tmp_path: Path) -> None:
    """Engine and fusing are scripted. The log of each page's last server is kept."""
    quickstart = guide("README.md").partition("## Quickstart")[2].partition("\n## ")[0]
    pages = {"quickstart": quickstart, "guide": guide("docs/guide.md"), "api": guide("docs/api.md")}
    text = "".join(f"{page}\n```bash\ncp serve.log {name}.log\n```\n" for name, page in pages.items())
    ports = {port: str(free_port()) for port in ("8000", "18861")}
    for port, free in ports.items():
        text = text.replace(port, free)
    address = f"127.0.0.1:{ports['18861']}"
    text = text.replace('Client("localhost", ', f'Client("localhost", {ports["18861"]}, ')
    with commands(tmp_path) as programs:
        variables = {"VLORA_SERVER": address, "VLORA_SERVE_RPYC_PORT": ports["18861"]}
        found = ran(text, tmp_path, programs, **variables)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in pages}
    assert logs["guide"].count("\n") == 1, f"a quiet server prints one line: {logs['guide']}"
    assert "fused-1  rank 8" in found.printed and '"num_running":0' in found.printed
    answers = [json.loads(line) for line in (tmp_path / "signs.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["dark", "bright", "dark"]
    kinds = ("csv", "jsonl", "webm")
    results = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert results == [f"{name}.{kind}" for name in ("north", "south") for kind in kinds]
    assert "ready: rpyc+tls 0.0.0.0:" in logs["api"] and "warning" not in logs["api"]
    assert '"id":"signs"' in found.printed and 'vlora_requests_total{adapter="base",outcome="ok"} ' in found.printed
    for token in re.findall(r"token: (\S+?)[,}]", (tmp_path / "tokens.yaml").read_text()):
        assert token not in logs["api"]


@pytest.mark.exhaustive
def test_the_guide_of_base_executors(tmp_path: Path) -> None:
    printed = ran(guide("docs/split.md"), tmp_path, real(tmp_path), log="base.log").printed
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    (apart,) = re.findall(r"apart by (\S+)", printed)
    assert 0 < float(apart) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.exhaustive
def test_the_guide_of_trainings(tmp_path: Path) -> None:
    variables = {"VLORA_SERVER": f"127.0.0.1:{(port := free_port())}", "VLORA_SERVE_RPYC_PORT": str(port)}
    printed = ran(guide("docs/training.md"), tmp_path, real(tmp_path), **variables).printed
    losses = r"^signs  finished  step 30 of 30  loss ([\d.]+)  held out before ([\d.]+), after"
    ((loss, before),) = re.findall(losses, printed, re.M)
    assert float(loss) < float(before) and "adapter_model.safetensors" in printed
    for line in (
        r"^more  running  step 0 of 1000",
        r"^more  cancelled  step \d+ of 1000",
        r"^  \w{12}  present  signs\.training-1  live \d\.\d{3} \(bound",
        r"^\w+ board$",  # the new version answers
        r"^  \w{12}  present  from .*trainings/signs/adapter",  # rolled back
    ):
        assert re.search(line, printed, re.M), line
