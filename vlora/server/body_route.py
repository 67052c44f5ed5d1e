"""A short way into a route that takes one JSON body."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel


class BodyRoute(APIRoute):
    """For `async def endpoint(body: Model, request: Request) -> Response`, documented as any other route.

    What FastAPI does for every possible signature takes about as long as all the rest of a request's way in. A body
    that is right goes past it; everything else takes FastAPI's own way, which says what is wrong.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        fastapis_way = super().get_route_handler()
        endpoint: Callable[[Any, Request], Awaitable[Response]] = self.endpoint
        (model, _) = (each.annotation for each in inspect.signature(endpoint, eval_str=True).parameters.values())
        assert issubclass(model, BaseModel)

        async def handle(request: Request) -> Response:
            if request.headers.get("content-type") == "application/json":
                data = await request.body()  # which the request keeps
                try:
                    body = model.model_validate(json.loads(data))
                except (ValueError, RecursionError):
                    return await fastapis_way(request)
                return await endpoint(body, request)
            return await fastapis_way(request)

        return handle
