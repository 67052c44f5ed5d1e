"""Behavior of a rank other than 0 on its own."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.worker import Follower
from vlora.errors import EngineDead
from vlora.memory.adapter_cache import Appointed


def test_an_adapter_that_does_not_arrive_ends_the_rank() -> None:
    """Its copy failed on this rank only: rank 0 knows that the files were read, and uses the adapter in the next
    step.
    """
    read: Future[object] = Future()
    read.set_result("adapter")
    brought: list[object] = []
    follower = Follower.__new__(Follower)
    follower._coming = {"a": (messages.Bring("a", "/a", "1", "replicated", 0, 1), read)}  # type: ignore[dict-item]
    follower._known = {}
    follower._appointed = Appointed()
    follower._side = SimpleNamespace(bank=SimpleNamespace(bring=brought.append, resident=frozenset()))  # type: ignore[assignment]
    with pytest.raises(EngineDead, match="adapter 'a' was read, but could not be copied to this rank's device"):
        follower._settle()
    assert brought == ["adapter"]
