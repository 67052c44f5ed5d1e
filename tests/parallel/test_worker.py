"""Behavior of a rank other than 0 on its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.worker import ShardLoader
from vlora.errors import EngineDead
from vlora.memory.adapter_cache import WorkerAdapterCache


def test_a_failed_copy_to_the_device_ends_the_rank() -> None:
    """It failed on this rank only: rank 0 knows that the files were read, and uses the adapter in the next step."""
    loads: list[object] = []
    pool: Any = SimpleNamespace(load=loads.append, resident=frozenset())
    adapter: Any = "adapter"
    reports: list[messages.AdapterRead] = []
    with ThreadPoolExecutor(1) as executor:
        shards = ShardLoader(pool, WorkerAdapterCache(), lambda order: adapter, reports.append, executor)
        shards.start(messages.LoadShard("a", (messages.AdapterFolder("a", "/a", "1", "replicated"),), 0, 1))
    assert reports == [messages.AdapterRead("a")]
    with pytest.raises(EngineDead, match="adapter 'a' was read, but could not be copied to this rank's device"):
        shards.load_read()
    assert loads == [adapter]
