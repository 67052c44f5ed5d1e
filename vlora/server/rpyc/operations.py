"""The calls of an operator over RPyC, with their arguments checked: adapters, trainings, corrections and replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vlora.config import Token
from vlora.server.frontend import FrontEnd
from vlora.server.learning.door import LearningDoor
from vlora.server.rpyc.arguments import bounded_wait_s, checked, positional
from vlora.server.security.access import is_admin
from vlora.server.security.public_errors import statuses_for
from vlora.types import AdapterStatus, TrainingStatus
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus


class Operations:
    """Of one connection. caller: its token, checked again at each call; None on a server without tokens."""

    def __init__(self, front_end: FrontEnd, caller: Callable[[], Token | None]) -> None:
        self._front_end = front_end
        self._caller = caller
        self._door = LearningDoor(front_end)

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        return statuses_for(await self._front_end.adapters.list(), self._caller())

    async def load_adapter(self, name: Any, path: Any) -> AdapterStatus:
        return await self._front_end.adapters.load(checked("name", name, str), checked("path", path, str))

    async def unload_adapter(self, name: Any, drain: Any) -> None:
        await self._front_end.adapters.unload(checked("name", name, str), checked("drain", drain, bool))

    async def pin_adapter(self, name: Any, pinned: Any) -> AdapterStatus:
        return await self._front_end.adapters.pin(checked("name", name, str), checked("pinned", pinned, bool))

    async def train(self, plan: Any) -> tuple[TrainingStatus, ...]:
        return await self._front_end.adapters.train(checked("plan", plan, str))

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        found = await self._front_end.adapters.trainings()
        return found if is_admin(self._caller()) else tuple(one.without_paths() for one in found)

    async def cluster(self) -> ClusterStatus:
        found = await self._front_end.replicas.status()
        return found if is_admin(self._caller()) else found.without_causes()

    async def cluster_adapters(self) -> tuple[AdapterPlace, ...]:
        found = await self._front_end.replicas.adapters()
        return found if is_admin(self._caller()) else tuple(one.without_cause() for one in found)

    async def correct(self, request_id: Any, label: Any) -> Correction:
        return await self._door.correct(checked("id", request_id, str), checked("label", label, str), self._caller())

    async def learning(self) -> tuple[LearningStatus, ...]:
        return await self._door.statuses(self._caller())

    async def promote(self, args: tuple[Any, ...]) -> LearningStatus:
        name, version, path, force = positional("promote", args, 4)
        return await self._door.promote(
            checked("name", name, str),
            self._caller(),
            version=checked("version", version, str | None),
            path=checked("path", path, str | None),
            force=checked("force", force, bool),
        )

    async def roll_back(self, name: Any, version: Any) -> LearningStatus:
        earlier = checked("version", version, str | None)
        return await self._door.roll_back(checked("name", name, str), self._caller(), earlier)

    async def cancel_training(self, name: Any) -> TrainingStatus:
        return await self._front_end.adapters.cancel_training(checked("name", name, str))

    async def drain_replica(self, name: Any, wait_s: Any) -> bool:
        return await self._front_end.replicas.drain(checked("name", name, str), bounded_wait_s(wait_s))

    async def scale(self, number: Any, wait_s: Any) -> bool:
        wanted = checked("number", number, int | Literal["auto"])
        return await self._front_end.replicas.scale(wanted, bounded_wait_s(wait_s))

    async def resume_replica(self, name: Any) -> None:
        await self._front_end.replicas.resume(checked("name", name, str))
