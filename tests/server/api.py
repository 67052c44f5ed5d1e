"""The HTTP API in a thread of the test process, called through real sockets."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import PATIENCE_S
from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from vlora.config import ServerConfig
from vlora.server.frontend import FrontEnd
from vlora.server.http.routes import make_app
from vlora.server.http.server import HttpServer
from vlora.server.security.access import Access


class Api(NamedTuple):
    """token: sent by `call`. tls: settings for its connections."""

    port: int
    engine: Any
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

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
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        else:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=30, context=self.tls)
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
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.engine.engine.running


@contextmanager
def running_api(
    engine: Any = None,
    processor: Any = None,
    model: str = "base",
    other_listener: Any = None,
    adapters: Mapping[str, Mapping[str, int]] | None = None,
    **settings: Any,
) -> Iterator[Api]:
    """Serve the HTTP API until the end of the block, by default over a scripted engine.

    Args:
        adapters: Adapters to load, by name: the number of frames of each of their heads.
        settings: Fields of ServerConfig.
    """
    config = ServerConfig(http_port=0, **settings)
    started: Future[Api] = Future()
    stopping = asyncio.Event()

    async def main() -> None:
        used = engine or ScriptedInterface()
        front_end = FrontEnd(used, processor or ByteProcessor(), config, model)  # type: ignore[arg-type]
        server = HttpServer(config)
        server.start(make_app(front_end, model, Access(config.tokens), other_listener))
        started.set_result(Api(int(server.address.split(":")[1]), used, front_end, asyncio.get_running_loop()))
        await stopping.wait()
        await server.close()
        await front_end.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    made = started.result(PATIENCE_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, heads in (adapters or {}).items():
                made.on_loop(made.front_end.adapters.load(name, write_adapter(Path(folder) / name, dict(heads))))
            yield made
    finally:
        made.loop.call_soon_threadsafe(stopping.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def image_part(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
