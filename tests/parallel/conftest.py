"""Leaves no process behind for tests that count theirs."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="package", autouse=True)
def fork_server() -> Iterator[None]:
    """The server that ranks are forked from outlives them, for the next ones; here it ends with the last test."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
