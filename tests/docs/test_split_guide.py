"""docs/split.md as run by a reader: every snippet, in order, with base executors of the package's own model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.guide_run import run_guide

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bash") is None, reason="the guide uses bash")
def test_every_snippet_runs(tmp_path: Path) -> None:
    printed = run_guide("split.md", tmp_path, "base.log")
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    (apart,) = re.findall(r"apart by (\S+)", printed)
    assert 0 < float(apart) < 1e-4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
