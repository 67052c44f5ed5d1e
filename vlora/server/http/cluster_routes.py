"""HTTP routes of the replicas behind one server, for operators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import field_validator

from vlora.server.frontend import FrontEnd
from vlora.server.http.callers import caller_of
from vlora.server.http.middleware import CLUSTER_PATHS
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.security.public_errors import shown_to
from vlora.types.replicas import ClusterStatus

Wait = Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)]
"""Seconds until the response to a change that is not done yet; the change goes on."""

_REPLICA = CLUSTER_PATHS + "/replicas/{name}/drain"


class Scale(StrictModel):
    """replicas: their number, or "auto" for automatic scaling."""

    replicas: int | Literal["auto"]

    @field_validator("replicas", mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError('it must be a whole number, or "auto"')
        return value


class ClusterRoutes:
    """Status and changes of the replicas. With one engine each answer is a 404."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._replicas = front_end.replicas

    def add_to(self, app: FastAPI) -> None:
        app.get(CLUSTER_PATHS)(self.status)
        app.put(CLUSTER_PATHS + "/scale")(self.scale)
        app.put(_REPLICA)(self.drain)
        app.delete(_REPLICA)(self.resume)

    async def status(self, request: Request) -> dict[str, Any]:
        """The replicas, their queue, what happened to requests, and the last change of their number with its reason."""
        return _fields(shown_to(await self._replicas.status(), caller_of(request)))

    async def drain(self, name: str, wait_s: Wait = 5.0) -> Response:
        """Move a replica's requests to others, and send it no further ones; 202 while it still has requests."""
        return await self._changed(await self._replicas.drain(name, wait_s))

    async def resume(self, name: str) -> Response:
        """Send requests to a drained replica again."""
        await self._replicas.resume(name)
        return await self._changed(done=True)

    async def scale(self, body: Scale, wait_s: Wait = 5.0) -> Response:
        """Have another number of replicas, or let the load decide; 202 while it is not done.

        Starts go on by themselves. Replicas that drain are ended by another call only.
        """
        return await self._changed(await self._replicas.scale(body.replicas, wait_s))

    async def _changed(self, done: bool) -> Response:
        return JSONResponse({"done": done, **_fields(await self._replicas.status())}, 200 if done else 202)


def _fields(status: ClusterStatus) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(status)
    return fields
