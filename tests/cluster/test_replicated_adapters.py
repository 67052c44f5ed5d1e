"""Changes of adapters on all replicas or on none, while some refuse and some die."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.engine.ipc.client import EngineClient
from vlora.errors import BadRequest, EngineDead, VLoraError
from vlora.types import AdapterStatus

STATUS = AdapterStatus(
    name="x",
    version="1",
    rank=8,
    num_bytes=1,
    resident=True,
    mergeable=True,
    merge_fidelity=1.0,
    touches_vision=False,
    heads=(),
)


class Engine:
    """Its answers to pins in order: None, or an error. The pins that it has made are kept."""

    def __init__(self, *answers: VLoraError | None) -> None:
        self.answers = list(answers)
        self.pins: list[bool] = []

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        error = self.answers.pop(0)
        if error is not None:
            raise error
        self.pins.append(pinned)
        return STATUS


def pin(engines: dict[str, Engine], gone: tuple[str, ...] = ()) -> None:
    """gone: replicas that are lost once all have answered."""
    num_calls = 0

    def present() -> dict[str, EngineClient]:
        nonlocal num_calls
        num_calls += 1
        left = engines if num_calls == 1 else {name: each for name, each in engines.items() if name not in gone}
        return cast(dict[str, EngineClient], left)

    asyncio.run(ReplicatedAdapters(present).pin("x", True))


def test_a_refused_pin_is_undone_although_a_replica_died() -> None:
    engines = {
        "a": Engine(EngineDead("dead")),
        "b": Engine(None, None),
        "c": Engine(BadRequest("no slot")),
        "d": Engine(None, None),
    }
    with pytest.raises(BadRequest, match="no slot"):
        pin(engines, gone=("a",))
    assert engines["b"].pins == engines["d"].pins == [True, False]


def test_an_undo_that_fails_on_one_replica_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engines = {
        "a": Engine(None, EngineDead("it died then")),
        "b": Engine(None),
        "c": Engine(BadRequest("no slot")),
        "d": Engine(None, None),
    }
    with pytest.raises(BadRequest, match="no slot"):
        pin(engines, gone=("b",))
    assert engines["d"].pins == [True, False]
    assert "adapter 'x' could not be restored on replica 'a': it died then" in caplog.text
