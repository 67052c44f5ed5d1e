"""A cluster over replicas in this process, in virtual time; with or without an adapter that changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import SECRET
from tests.cluster.sleeping_engine import version_of
from vlora.cluster import members
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.routing import Router

V1, V2, V3 = (version_of(text) for text in "123")
"""The contents of the adapter `x`."""


class Here:
    """A cluster of replicas `a`, `b`, ..."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        names: str,
        *,
        rule: str = "placed",
        over: float = 1.5,
        state: AdapterState | None = None,
    ) -> None:
        self.replicas = {name: LocalReplica() for name in names}
        monkeypatch.setattr(members, "connect", connecting({ord(n): r for n, r in self.replicas.items()}))
        self.router = Router(rule, over=over)
        self.cluster = Cluster(self.router, SECRET, absent_s=60.0, adapters=state)

    async def add(self, name: str) -> None:
        await self.cluster.add(name, Address("127.0.0.1", ord(name)))

    def where(self, request_id: str) -> str:
        name = self.router.where(request_id)
        assert name is not None
        return name

    async def restart(self, name: str) -> None:
        """Let a replica die, and come back."""
        self.replicas[name].kill()
        await asyncio.sleep(0.1)
        self.replicas[name].start()
        await self.cluster.members[name].wait_joined()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The replicas are in the cluster for the block, and end after it."""
        try:
            for name in self.replicas:
                await self.add(name)
            yield
        finally:
            await self.cluster.close()
            for replica in self.replicas.values():
                replica.kill()


@contextlib.asynccontextmanager
async def cluster_of(monkeypatch: pytest.MonkeyPatch, num_replicas: int, over: float = 1.5) -> AsyncIterator[Here]:
    here = Here(monkeypatch, "abcdefgh"[:num_replicas], over=over)
    async with here.serving():
        yield here


class WithAdapter(Here):
    """With the files of the adapter `x` in a folder of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, names: str, rule: str, state: AdapterState | None
    ) -> None:
        super().__init__(monkeypatch, names, rule=rule, over=4.0, state=state)
        self.paths = {text: str(folder / text) for text in "123"}
        for text, path in self.paths.items():
            Path(path).write_text(text)

    async def load(self, text: str) -> None:
        assert (await self.cluster.load_adapter("x", self.paths[text])).version == version_of(text)

    async def move_all(self) -> None:
        for name in tuple(self.router.replicas):
            await self.cluster.drain(name, 0.4)
            self.cluster.resume(name)

    def contents(self) -> set[str]:
        """The versions of `x` on the replicas; empty where it is missing."""
        found = [replica.engine.adapters() for replica in self.replicas.values() if replica.alive]
        return {next((status.version for status in own if status.name == "x"), "") for own in found}

    async def check_idle(self) -> None:
        """Nothing of former contents is left."""
        await asyncio.sleep(1.0)
        self.router.check_integrity()
        assert not (self.cluster.num_unfinished or self.router.num_waiting)
        assert not any(standing.lacks for standing in self.router.replicas.values())
        assert not any(replica.engine.kept for replica in self.replicas.values() if replica.alive)


def on(
    main: Callable[[WithAdapter], Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    names: str = "ab",
    rule: str = "placed",
    state: Callable[[], AdapterState] | None = None,
) -> None:
    """Run a test on a cluster with an adapter."""

    async def run() -> None:
        here = WithAdapter(monkeypatch, folder, names, rule, None if state is None else state())
        async with here.serving():
            await main(here)

    run_virtually(run())
