"""The cached statuses of adapters."""

from __future__ import annotations

import asyncio

import pytest

from vlora.cluster.summary import failed_status
from vlora.server import adapter_catalog
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.metrics import Metrics
from vlora.types import AdapterStatus


class Listing:
    """An engine with one adapter, which has failed."""

    def __init__(self) -> None:
        self.num_lists = 0
        self.error = "broken"

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        self.num_lists += 1
        return (failed_status("signs", self.error),)


def test_requests_of_a_failed_adapter_do_not_list_all_adapters_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Listing()
        catalog = AdapterCatalog(engine, Metrics(), "base", None)  # type: ignore[arg-type]
        monkeypatch.setattr(adapter_catalog, "ERROR_S", 1000.0)
        for _ in range(100):
            assert (await catalog.get("signs")).error == "broken"
        assert engine.num_lists == 1
        monkeypatch.setattr(adapter_catalog, "ERROR_S", 0.0)
        engine.error = "other"
        assert (await catalog.get("signs")).error == "other"

    asyncio.run(main())
