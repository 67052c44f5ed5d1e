"""docs/training.md as run by a reader: every snippet, in order, with the package's own model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.guide_run import run_guide
from tests.docs.test_api_guide import free_port

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bash") is None, reason="the guide uses bash")
def test_every_snippet_runs(tmp_path: Path) -> None:
    port = free_port()
    variables = {"VLORA_SERVER": f"127.0.0.1:{port}", "VLORA_SERVE_RPYC_PORT": str(port)}
    printed = run_guide("training.md", tmp_path, "serve.log", variables)
    finished = re.findall(
        r"^signs  finished  step 30 of 30  loss ([\d.]+)  held out before ([\d.]+), after", printed, re.M
    )
    assert finished and float(finished[0][0]) < float(finished[0][1])
    assert "adapter_model.safetensors" in printed
    assert re.search(r"^more  running  step 0 of 1000", printed, re.M)
    assert re.search(r"^more  cancelled  step \d+ of 1000", printed, re.M)
    assert re.search(r"^  \w{12}  present  signs\.training-1  live \d\.\d{3} \(bound", printed, re.M)
    assert re.search(r"^\w+ board$", printed, re.M), "the new version answers"
    assert re.search(r"^  \w{12}  present  from .*trainings/signs/adapter", printed, re.M), "rolled back"
