"""A deployment of Ray Serve that passes HTTP requests on to a V-LoRA server, streams too (docs/cluster.md).

VLORA_URL=http://10.0.0.2:8000 serve run examples.ray_serve:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

OF_ONE_CONNECTION = {"host", "connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length"}


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
class Proxy:
    def __init__(self, url: str) -> None:
        self.url = url
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        if self.session is None:  # it belongs to the event loop of the requests
            waiting = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self.session = aiohttp.ClientSession(timeout=waiting, auto_decompress=False)
        target = f"{self.url}{request.url.path}?{request.url.query}".rstrip("?")
        headers = {name: value for name, value in request.headers.items() if name not in OF_ONE_CONNECTION}
        try:
            answer = await self.session.request(request.method, target, headers=headers, data=await request.body())
        except aiohttp.ClientError as error:
            return JSONResponse({"error": {"message": f"no server answers at {self.url}: {error}"}}, 502)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        return StreamingResponse(_body(answer), answer.status, kept)


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:  # which ends the request at the server if the client leaves
        async for chunk in answer.content.iter_any():
            yield chunk


app = Proxy.bind(os.environ.get("VLORA_URL", "http://127.0.0.1:8000"))  # type: ignore[attr-defined]  # as Ray has it
