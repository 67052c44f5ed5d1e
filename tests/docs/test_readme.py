"""README.md: the quickstart as run by a reader, with a scripted engine; the sizes and extras in the text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.docs.test_api_guide import ROOT, free_port, script
from tests.docs.test_api_guide import folder as folder  # a fixture

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="the quickstart uses bash")
def test_the_quickstart_runs(folder: os.PathLike[str]) -> None:
    text = README.partition("## Quickstart")[2].partition("\n## ")[0]
    assert "vlora serve --model Qwen/Qwen2-VL-2B-Instruct --adapters " in text
    # The commands before the first one that is run install the package.
    text = "```bash\n" + text.partition("```bash\n")[2]
    text = text.replace("8000", str(free_port())).replace(
        "vlora serve ", f"vlora serve --rpyc-port {(rpyc := free_port())} "
    )
    environment = os.environ | {
        "PATH": f"{os.fspath(folder)}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "VLORA_SERVER": f"127.0.0.1:{rpyc}",
    }
    done = subprocess.run(
        ["bash", "-c", script(text) + "\n"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr + done.stdout
    answers = done.stdout.strip().splitlines()[-4:]
    assert len(answers) == 4 and all(answers), done.stdout


def test_extras_that_pages_name_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = [README, *(file.read_text() for file in (ROOT / "docs").glob("*.md"))]
    named = [found for page in pages for found in re.findall(r"'(?:vlora|\.)\[([\w,]+)\]'", page)]
    assert {"serve", "fuse", "video"} <= set(named)
    assert {extra for each in named for extra in each.split(",")} <= extras
