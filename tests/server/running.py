"""A front end on a scripted engine with its RPyC server, and HTTP if asked for, in a thread of the test process."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.processes import PATIENCE_S, until
from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from vlora.client import Client
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.config import ServerConfig
from vlora.server.batches.store import FileStore
from vlora.server.frontend import FrontEnd
from vlora.server.http.routes import make_app
from vlora.server.http.server import HttpServer
from vlora.server.received_adapters import ReceivedAdapters
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access
from vlora.wire.tls import server_context


class Running(NamedTuple):
    """port: RPyC's. http_port: 0 without HTTP. token: sent by `call` and `client`. tls: settings for their
    connections."""

    port: int
    engine: Any
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop
    http_port: int = 0
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def client(self, **options: Any) -> Client:
        return Client(port=self.port, **{"token": self.token, "tls": self.tls, **options})

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
            connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=PATIENCE_S)
        else:
            connection = http.client.HTTPSConnection("localhost", self.http_port, timeout=PATIENCE_S, context=self.tls)
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
def running_server(
    adapters: Mapping[str, Mapping[str, int]] | None = None,
    port: int = 0,
    *,
    engine: Any = None,
    processor: Any = None,
    model: str = "scripted",
    http: bool = False,
    rpyc_listens: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> Iterator[Running]:
    """Run the server until the end of the block.

    Args:
        adapters: Adapters to load, by name: the number of frames of each of their heads.
        port: The RPyC port; 0 for a free one.
        settings: Fields of ServerConfig.
    """
    config = ServerConfig(rpyc_port=port, http_port=0 if http else None, **settings)
    started: Future[Running] = Future()
    stopping = asyncio.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        used: Any = engine or ScriptedInterface()
        read: Any = processor or ByteProcessor()
        front_end = FrontEnd(used, read, config, model)
        front_end.received = ReceivedAdapters(config, ShippingLimits(), None, front_end.adapters)
        access = Access(config.tokens)
        rpyc = RpycServer(config.host, config.rpyc_port, config.max_message_bytes, server_context(config))
        rpyc.start_in_thread(front_end, loop, model, access)
        web = HttpServer(config) if http else None
        if web is not None:
            files = None if config.file_folder is None else FileStore(Path(config.file_folder), config)
            web.start(make_app(front_end, model, access, rpyc_listens, files))
        http_port = 0 if web is None else int(web.address.split(":")[1])
        started.set_result(Running(rpyc.port, used, front_end, loop, http_port))
        await stopping.wait()
        if web is not None:
            await web.close()
            if files is not None:
                files.close()
        await asyncio.to_thread(rpyc.close)
        await front_end.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    running = started.result(PATIENCE_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, heads in (adapters or {}).items():
                running.on_loop(running.front_end.adapters.load(name, write_adapter(Path(folder) / name, dict(heads))))
            yield running
    finally:
        running.loop.call_soon_threadsafe(stopping.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def png(brightness: int = 200, size: tuple[int, int] = (8, 8), kind: str = "PNG", mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, (brightness,) * len(mode)).save(stream, kind)
    return stream.getvalue()


def noise(seed: int, size: tuple[int, int]) -> bytes:
    """A PNG of random pixels. size: height and width."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()
