"""The clusters of tests in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.in_process import Maker


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Maker:
    """Makes clusters of replicas in this process: `async with cluster("ab") as here`, in a test that is `virtual`."""
    return Maker(monkeypatch, tmp_path)
