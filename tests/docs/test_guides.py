"""Guides as run by a reader: every snippet, in order, in one shell. For some the engine and fusing are scripted."""

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
from tests.processes import free_port
from tests.server.running import png
from tests.server.scripted import write_adapter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("bash", "curl", "openssl"))), reason="the guides use bash, curl and openssl"
    ),
]
SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# If a snippet fails because the server has exited, print its exit code; its output is in its log.
_LAST_WORDS = """
end() {
  code=$?
  if [ $code -ne 0 ] && [ -n "$server" ] && ! kill -0 $server 2> /dev/null; then
    wait $server && ended=0 || ended=$?
    echo "the server ended with exit code $ended" >&2
  fi
  exit $code
}
trap end EXIT
"""


def script(text: str) -> str:
    """All snippets; each prints its number first, and the first failure ends the run."""
    lines = ["set -e", _LAST_WORDS]
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


def ran(text: str, folder: Path, *, module: str = "vlora.cli", log: str = "serve.log", **variables: str) -> Ran:
    """Run the snippets of a text in a folder, with this checkout's commands. module: of the `vlora` command."""
    (commands := folder / "bin").mkdir()
    for name, of in (("vlora", f"-m {module}"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {of} "$@"\n')
        (commands / name).chmod(0o755)
    path, python = f"{commands}:{os.environ['PATH']}", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
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


def with_ports(text: str) -> tuple[str, int]:
    """A text with free ports for the server of its snippets. Returns the one for RPyC too."""
    for port in ("8000", "18861"):
        text = text.replace(port, str(free_port()))
    return text.replace("vlora serve ", f"vlora serve --rpyc-port {(rpyc := free_port())} "), rpyc


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The reader's files: a picture and an adapter with a head."""
    (tmp_path / "photo.png").write_bytes(png(size=(64, 64)))
    write_adapter(tmp_path / "out" / "adapters" / "signs", {"kind": 1})
    return tmp_path


SCRIPTED = "tests.docs.scripted_vlora"


def test_a_server_that_died_is_reported() -> None:
    text = "```bash\nsleep 60 &\nserver=$!\n```\n```bash\nkill -9 $server; sleep 0.2; false\n```\n"
    done = subprocess.run(["bash", "-c", script(text)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "the server ended with exit code 137" in done.stderr
    assert done.stderr.startswith("## 1\n## 2\n")


def test_the_quickstart(files: Path) -> None:
    text = guide("README.md").partition("## Quickstart")[2].partition("\n## ")[0]
    assert "vlora serve --model Qwen/Qwen2-VL-2B-Instruct --adapters " in text
    # The commands before the first one that is run install the package.
    text, rpyc = with_ports("```bash\n" + text.partition("```bash\n")[2])
    found = ran(text, files, module=SCRIPTED, VLORA_SERVER=f"127.0.0.1:{rpyc}")
    answers = found.printed.strip().splitlines()[-4:]
    assert len(answers) == 4 and all(answers), found.printed


@pytest.mark.exhaustive
def test_the_guide(files: Path) -> None:
    shutil.rmtree(files / "out")  # the guide makes its own
    text, rpyc = with_ports(guide("docs/guide.md"))
    text = text.replace("Client()", f"Client(port={rpyc})")
    found = ran(text, files, module=SCRIPTED, VLORA_SERVER=f"127.0.0.1:{rpyc}")
    assert found.log.count("\n") == 1, f"a quiet server prints one line: {found.log}"
    assert "fused-1  rank 8" in found.printed and '"num_running":0' in found.printed
    answers = [json.loads(line) for line in (files / "signs.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["dark", "bright", "dark"]
    kinds = ("csv", "jsonl", "webm")
    results = sorted(path.name for path in (files / "results").iterdir())
    assert results == [f"{name}.{kind}" for name in ("north", "south") for kind in kinds]


@pytest.mark.exhaustive
def test_the_api_guide(files: Path) -> None:
    text, rpyc = with_ports(guide("docs/api.md"))
    text = text.replace("vlora status --wait-s 60  ", f"vlora status --wait-s 60 --server 127.0.0.1:{rpyc} ")
    text = re.sub(r"--server localhost:\d+", f"--server localhost:{rpyc}", text)
    changes = re.compile(r"^(vlora adapters (?:load|pin|unpin|unload) .*)$", re.MULTILINE)
    text = changes.sub(rf"\1 --server 127.0.0.1:{rpyc}", text)
    found = ran(text.replace('Client("localhost", ', f'Client("localhost", {rpyc}, '), files, module=SCRIPTED)
    assert "ready: rpyc+tls 0.0.0.0:" in found.log and "warning" not in found.log
    assert '"id":"signs"' in found.printed and 'vlora_requests_total{adapter="base",outcome="ok"} ' in found.printed
    assert "signs  rank 8" in found.printed
    for token in re.findall(r"token: (\S+?)[,}]", (files / "tokens.yaml").read_text()):
        assert token not in found.log


@pytest.mark.exhaustive
def test_the_guide_of_base_executors(tmp_path: Path) -> None:
    printed = ran(guide("docs/split.md"), tmp_path, log="base.log").printed
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    (apart,) = re.findall(r"apart by (\S+)", printed)
    assert 0 < float(apart) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.exhaustive
def test_the_guide_of_trainings(tmp_path: Path) -> None:
    variables = {"VLORA_SERVER": f"127.0.0.1:{(port := free_port())}", "VLORA_SERVE_RPYC_PORT": str(port)}
    printed = ran(guide("docs/training.md"), tmp_path, **variables).printed
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
