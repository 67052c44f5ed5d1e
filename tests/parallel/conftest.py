"""Leaves no process behind, for tests that count their processes."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import active_children, forkserver, resource_tracker

import pytest


@pytest.fixture(scope="package", autouse=True)
def fork_server() -> Iterator[None]:
    """Stop the fork server after the last test; it normally outlives its ranks.

    It ends only after its children, so ranks that a failed fixture has left are killed before.
    """
    yield
    for rank in active_children():
        rank.kill()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # noqa: SLF001
