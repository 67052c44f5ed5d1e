"""HTTP routes of trainings and of adapters that learn."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field

from vlora import operations as op
from vlora.server.frontend import FrontEnd, choice_id
from vlora.server.http.callers import caller_of
from vlora.server.http.middleware import LEARNING_PATHS, TRAINING_PATHS
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.operations import perform
from vlora.server.security.public_errors import shown_to

_PREFIX = "chatcmpl-"


class PlanSource(StrictModel):
    """plan: a plan file on the server's file system."""

    plan: str


class CorrectionBody(StrictModel):
    """id: of the completion. choice: of several answers. label: the right answer."""

    id: str
    choice: int = Field(0, ge=0, le=2**31)
    label: str


class PromotionBody(StrictModel):
    """version: on disk; its first digits suffice. path: an adapter folder, instead. force: without an evaluation."""

    version: str | None = None
    path: str | None = None
    force: bool = False


class RollbackBody(StrictModel):
    """version: on disk; its first digits suffice. None: the one before."""

    version: str | None = None


class TrainingRoutes:
    """Administration of trainings."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._adapters = front_end.adapters

    def add_to(self, app: FastAPI) -> None:
        app.get(TRAINING_PATHS)(self.trainings)
        app.post(TRAINING_PATHS, status_code=201)(self.train)
        app.delete(TRAINING_PATHS + "/{name}")(self.cancel_training)

    async def trainings(self, request: Request) -> dict[str, Any]:
        """List the trainings: state, steps, losses, and why one does not run at present."""
        found = shown_to(await self._adapters.trainings(), caller_of(request))
        return {"object": "list", "data": msgspec.to_builtins(found)}

    async def train(self, body: PlanSource) -> dict[str, Any]:
        """Begin or continue the trainings of a plan file on the server's file system, all or none."""
        return {"object": "list", "data": msgspec.to_builtins(await self._adapters.train(body.plan))}

    async def cancel_training(self, name: str) -> dict[str, Any]:
        """End a training; posting its plan again continues it."""
        fields: dict[str, Any] = msgspec.to_builtins(await self._adapters.cancel_training(name))
        return fields


class LearningRoutes:
    """Corrections, and administration of versions."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/corrections")(self.correct)
        app.get(LEARNING_PATHS)(self.statuses)
        app.post(LEARNING_PATHS + "/{name}/promote")(self.promote)
        app.post(LEARNING_PATHS + "/{name}/rollback")(self.roll_back)

    async def correct(self, body: CorrectionBody, request: Request) -> dict[str, Any]:
        """Keep the right answer of a completion, for the training of the adapter that answered."""
        request_id = choice_id(body.id.removeprefix(_PREFIX), body.choice)
        return _json(await self._perform(op.Correct(request_id, body.label), request))

    async def statuses(self, request: Request) -> dict[str, Any]:
        """List the learning adapters: versions with their accuracies, and what happens."""
        return {"object": "list", "data": msgspec.to_builtins(await self._perform(op.GetLearning(), request))}

    async def promote(self, name: str, body: PromotionBody, request: Request) -> dict[str, Any]:
        """Evaluate a version in the background and serve it if it is better, or with `force` at once."""
        return _json(await self._perform(op.Promote(name, body.version, body.path, body.force), request))

    async def roll_back(self, name: str, body: RollbackBody, request: Request) -> dict[str, Any]:
        """Serve an earlier version again."""
        return _json(await self._perform(op.RollBack(name, body.version), request))

    async def _perform(self, operation: op.Operation, request: Request) -> Any:
        caller = caller_of(request)
        return shown_to(await perform(self._front_end, operation, caller), caller)


def _json(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return fields
