"""A front end with its RPyC server on a scripted engine, in a thread of the test process."""

from __future__ import annotations

import asyncio
import io
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tests.processes import PATIENCE_S
from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from vlora.config import ServerConfig
from vlora.server.frontend import FrontEnd
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access
from vlora.tls import server_context


class Running(NamedTuple):
    port: int
    engine: ScriptedInterface
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)


@contextmanager
def running_server(
    adapters: Mapping[str, Mapping[str, int]] | None = None, port: int = 0, **settings: Any
) -> Iterator[Running]:
    """Run the server until the end of the block.

    Args:
        adapters: Adapters to load, by name: the number of frames of each of their heads.
        port: The RPyC port; 0 for a free one.
        settings: Fields of ServerConfig.
    """
    config = ServerConfig(rpyc_port=port, **settings)
    started: Future[Running] = Future()
    stopping = asyncio.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = ScriptedInterface()
        front_end = FrontEnd(engine, ByteProcessor(), config, "scripted")  # type: ignore[arg-type]
        server = RpycServer(config.host, config.rpyc_port, config.max_message_bytes, server_context(config))
        access = Access(config.tokens)
        server.start_in_thread(front_end, loop, "scripted", access)
        started.set_result(Running(server.port, engine, front_end, loop))
        await stopping.wait()
        await asyncio.to_thread(server.close)
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


def png(brightness: int = 200, size: tuple[int, int] = (8, 8), kind: str = "PNG", mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, (brightness,) * len(mode)).save(stream, kind)
    return stream.getvalue()
