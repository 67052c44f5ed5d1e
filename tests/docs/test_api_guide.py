"""docs/api.md as run by a reader: every snippet, in order, in one shell, with a scripted engine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import png
from tests.server.scripted import write_adapter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "api.md"
SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The reader's files: a picture and an adapter with a head."""
    (tmp_path / "photo.png").write_bytes(png(size=(64, 64)))
    write_adapter(tmp_path / "out" / "adapters" / "signs", {"kind": 1})
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("vlora", "-m tests.docs.scripted_vlora"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    return tmp_path


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


def test_a_server_that_died_is_told_of() -> None:
    text = "```bash\nsleep 60 &\nserver=$!\n```\n```bash\nkill -9 $server; sleep 0.2; false\n```\n"
    done = subprocess.run(["bash", "-c", script(text)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "the server ended with exit code 137" in done.stderr
    assert done.stderr.startswith("## 1\n## 2\n")


@pytest.mark.exhaustive
@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "openssl"))), reason="the guide uses curl and openssl")
def test_every_snippet_runs(folder: Path) -> None:
    text = GUIDE.read_text()
    for port in ("8000", "18861"):
        text = text.replace(port, str(free_port()))
    # Ports that the text takes from the defaults.
    text = text.replace("vlora serve ", f"vlora serve --rpyc-port {(rpyc := free_port())} ")
    text = text.replace("vlora status --wait-s 60  ", f"vlora status --wait-s 60 --server 127.0.0.1:{rpyc} ")
    text = re.sub(r"--server localhost:\d+", f"--server localhost:{rpyc}", text)
    changes = re.compile(r"^(vlora adapters (?:load|pin|unpin|unload) .*)$", re.MULTILINE)
    text = changes.sub(rf"\1 --server 127.0.0.1:{rpyc}", text)
    text = text.replace('Client("localhost", ', f'Client("localhost", {rpyc}, ')
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        ["bash", "-c", script(text) + "\n"], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    log = (folder / "serve.log").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\n{log}"
    assert "ready: rpyc+tls 0.0.0.0:" in log and "warning" not in log
    assert '"id":"signs"' in done.stdout and 'vlora_requests_total{adapter="base",outcome="ok"} ' in done.stdout
    assert "signs  rank 8" in done.stdout
    for token in re.findall(r"token: (\S+?)[,}]", (folder / "tokens.yaml").read_text()):
        assert token not in log
