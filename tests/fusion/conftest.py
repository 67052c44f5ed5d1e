"""The small base of the tests of training, written once for all of them."""

from __future__ import annotations

import pytest
import torch

from tests.fusion.small import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its folder, which no test changes."""
    torch.set_num_threads(1)
    return write_base(tmp_path_factory.mktemp("base"))
