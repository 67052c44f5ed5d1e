"""docs/guide.md as run by a reader: every snippet, in order, in one shell; fusing and the engine are scripted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_api_guide import ROOT, free_port, script
from tests.docs.test_api_guide import folder as folder  # a fixture

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl"))), reason="the guide uses bash and curl")
def test_every_snippet_runs(folder: Path) -> None:
    shutil.rmtree(folder / "out")  # the guide makes its own
    text = (ROOT / "docs" / "guide.md").read_text()
    text = text.replace("8000", str(free_port())).replace(
        "vlora serve ", f"vlora serve --rpyc-port {(rpyc := free_port())} "
    )
    text = text.replace("Client()", f"Client(port={rpyc})")
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "VLORA_SERVER": f"127.0.0.1:{rpyc}",
    }
    done = subprocess.run(
        ["bash", "-c", script(text) + "\n"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    served = folder / "serve.log"
    log = served.read_text() if served.exists() else "the server did not start"
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\n{log}"
    assert log.count("\n") == 1, f"a quiet server prints one line: {log}"
    assert "digits-and-3-more  rank 8" in done.stdout and '"num_running":0' in done.stdout
    answers = [json.loads(line) for line in (folder / "signs.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["dark", "bright", "dark"]
    assert sorted(path.name for path in (folder / "results").iterdir()) == [
        f"{name}.{kind}" for name in ("north", "south") for kind in ("csv", "jsonl", "webm")
    ]


def test_every_command_is_told_of() -> None:
    from vlora.cli import cli

    told = "".join((ROOT / file).read_text() for file in ("README.md", "docs/guide.md", "docs/api.md"))
    assert [name for name in cli.commands if f"vlora {name}" not in told and name != "model"] == []
