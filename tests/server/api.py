"""A scripted server with HTTP beside RPyC, called through real sockets."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.processes import PATIENCE_S, until
from tests.server.running import running_server
from vlora.client import Client
from vlora.server.frontend import FrontEnd


class Api(NamedTuple):
    """port: HTTP's. token: sent by `call` and `client`. tls: settings for their connections."""

    port: int
    engine: Any
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop
    rpyc_port: int
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def client(self, **options: Any) -> Client:
        return Client(port=self.rpyc_port, **{"token": self.token, "tls": self.tls, **options})

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        if self.tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        else:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=PATIENCE_S, context=self.tls)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | (
            {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        )
        connection.request(method, path, data, sent | (headers or {}))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()

    def chat(self, content: Any, **fields: Any) -> tuple[int, Any]:
        body = {"model": "base", "messages": [{"role": "user", "content": content}], **fields}
        return self.call("POST", "/v1/chat/completions", body)

    def idle(self) -> bool:
        until(lambda: not self.engine.engine.running)
        return True


@contextmanager
def running_api(
    engine: Any = None,
    processor: Any = None,
    model: str = "base",
    rpyc_listens: Callable[[], bool] = lambda: True,
    adapters: Mapping[str, Mapping[str, int]] | None = None,
    **settings: Any,
) -> Iterator[Api]:
    """Serve both APIs until the end of the block, by default over a scripted engine. See `running_server`."""
    parts: dict[str, Any] = {"engine": engine, "processor": processor, "rpyc_listens": rpyc_listens}
    with running_server(adapters, model=model, http=True, **parts, **settings) as running:
        yield Api(running.http_port, running.engine, running.front_end, running.loop, running.port)


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def events(text: str) -> list[Any]:
    lines = [re.sub("^(event: .*\n)?data: ", "", line) for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
