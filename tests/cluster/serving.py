"""An RPyC server in front of a cluster with scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from tests.cluster.running import Running, running
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor
from vlora.config import ServerConfig
from vlora.server.frontend import FrontEnd
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access


class Serving(NamedTuple):
    running: Running
    front_end: FrontEnd
    port: int


@contextlib.asynccontextmanager
async def serving(*names: str) -> AsyncIterator[Serving]:
    """Serve replicas of these names, which get requests in turn."""
    async with running(*names, rule="round_robin", command=ENGINE_COMMAND) as found:
        config = ServerConfig(rpyc_port=0)
        front_end = FrontEnd(found.cluster, ByteProcessor(), config, "scripted")  # type: ignore[arg-type]
        server = RpycServer(config.host, config.rpyc_port, config.max_message_bytes, None)
        server.start_in_thread(front_end, asyncio.get_running_loop(), "scripted", Access(()))
        try:
            yield Serving(found, front_end, server.port)
        finally:
            await asyncio.to_thread(server.close)
            await front_end.close()
