"""A checkpoint with data for each module of tests."""

from __future__ import annotations

import pytest

from tests.training.beside import Case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("module") / "case")
