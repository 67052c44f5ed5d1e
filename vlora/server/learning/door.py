"""Corrections and versions as callers of RPyC and HTTP reach them, with their permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.config import Token
from vlora.errors import BadRequest
from vlora.learning.sample_store import Corrector
from vlora.server.frontend import FrontEnd
from vlora.server.security.access import is_admin
from vlora.types.learning import Correction, LearningStatus

if TYPE_CHECKING:
    from vlora.learning.learning import Learning

OPERATOR = "operator"
"""The name of a caller in the audit log, on a server without tokens."""


class LearningDoor:
    """caller: the token of the call; None on a server without tokens, where every caller is an operator."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    async def correct(self, request_id: str, label: str, caller: Token | None) -> Correction:
        """Keep the right answer of a request of this caller; an admin may correct all. Raises as `Learning.correct`."""
        by = Corrector(None, True) if caller is None else Corrector(caller.name, caller.admin)
        return await self._learning.correct(request_id, label, by)

    async def statuses(self, caller: Token | None) -> tuple[LearningStatus, ...]:
        """Every learning adapter; without paths if the caller is no admin."""
        learning = self._front_end.learning
        found = () if learning is None else await learning.statuses()
        return tuple(one if is_admin(caller) else one.without_paths() for one in found)

    async def promote(
        self, name: str, caller: Token | None, *, version: str | None, path: str | None, force: bool
    ) -> LearningStatus:
        """See `Learner.promote`. The caller is an admin."""
        return await self._learning.get(name).promote(_name(caller), version=version, path=path, force=force)

    async def roll_back(self, name: str, caller: Token | None, version: str | None) -> LearningStatus:
        """See `Learner.roll_back`. The caller is an admin."""
        return await self._learning.get(name).roll_back(_name(caller), version)

    @property
    def _learning(self) -> Learning:
        if self._front_end.learning is None:
            raise BadRequest("no adapter of this server learns; start it with --learn PLAN")
        return self._front_end.learning


def _name(caller: Token | None) -> str:
    return OPERATOR if caller is None else caller.name
