"""`vlora serve`: starts the engine process, loads the adapters, opens the front end here, ends all of it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vlora.config import EngineConfig, ServerConfig, Token
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.errors import BadConfig, EngineDead
from vlora.server.frontend import FrontEnd
from vlora.server.rpyc.protocol import RpycServer
from vlora.server.rpyc.service import VLoraService
from vlora.server.security.access import Access
from vlora.server.security.tls import server_context

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor
    from vlora.server.http.server import HttpServer

log = logging.getLogger(__name__)

_NAMES_SHOWN = 20  # of the adapters, in the line that says that all is ready


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    adapters: Mapping[str, str],
    *,
    announce: Callable[[str], None],
    model_name: str | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    load_processor: Callable[[str], InputProcessor] | None = None,
    read_tokens: Callable[[], tuple[Token, ...]] | None = None,
) -> None:
    """Serve until interrupted or terminated, then drain. adapters: name -> folder. announce is told when all is ready,
    and of tokens that were read anew.

    read_tokens: gives the tokens anew when the process is told to by SIGHUP; None where they cannot change.

    An engine that dies is started again; the front end stays, so that every client hears why, and streams go on.

    Raises BadConfig (model, settings, address), BadAdapter; EngineDead at the end if there was no engine by then.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls = server_context(server_config)
    access = Access(server_config.tokens)
    if read_tokens is not None:
        reload = functools.partial(_reload_tokens, access, server_config, read_tokens, announce)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    if tls is None and not server_config.on_loopback:
        log.warning(
            "without TLS, tokens and pictures can be read on their way to %s; give --tls-cert and --tls-key",
            server_config.host,
        )
    # Taking the address first: a port in use is known before the model is loaded.
    rpyc_server = RpycServer(server_config.host, server_config.rpyc_port, server_config.max_message_bytes, tls)
    http_server: HttpServer | None = None
    model = model_name or engine_config.model
    try:
        if server_config.http_port is not None:
            from vlora.server.http.routes import make_app
            from vlora.server.http.server import HttpServer

            http_server = HttpServer(server_config)
        starting = asyncio.create_task(
            _start(engine_config, server_config, model, adapters, engine_command, load_processor or _load_processor)
        )
        if await _first(starting, stop) is None:
            return
        engine, front_end = starting.result()
        loop = asyncio.get_running_loop()
        rpyc_server.start_in_thread(lambda peer: VLoraService(front_end, loop, model, access, peer), front_end.held)
        if http_server is not None:
            http_server.start(make_app(front_end, model, access, others_listen=lambda: rpyc_server.listening))
        web = f" | {'http' if tls is None else 'https'} {http_server.address}" if http_server else ""
        names = ", ".join(sorted(adapters)) or "none"
        if len(adapters) > _NAMES_SHOWN:
            names = f"{len(adapters)} (`vlora adapters` lists them)"
        rpyc = f"{'rpyc' if tls is None else 'rpyc+tls'} {rpyc_server.host}:{rpyc_server.port}"
        # What is there by now stays: a full collection would look at all of it again, in the middle of answers.
        gc.freeze()
        table, threads = "", "threads unknown"
        with contextlib.suppress(EngineDead):  # it is being restarted
            stats = await engine.stats()
            table, threads = stats.atmm_table, _threads(stats.num_threads, engine_config)
        announce(f"ready: {rpyc}{web} | model {model} | {threads} | adapters: {names}")
        if table:
            announce(f"ATMM table: {table}")
        await stop.wait()
        stop.clear()
        await _first(asyncio.create_task(front_end.drain()), stop)
        # While another engine is on its way nothing has failed for good.
        cause = None if engine.starting else engine.cause
        await engine.close()
        await front_end.close()
        if cause is not None:
            raise EngineDead(cause)
    finally:
        gc.unfreeze()  # or libraries would report as leaked, at exit, what nothing collected
        if http_server is not None:
            await http_server.close()
        # In a thread: the last replies come from this loop.
        await asyncio.to_thread(rpyc_server.close)


async def _start(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    model: str,
    adapters: Mapping[str, str],
    engine_command: Sequence[str],
    load_processor: Callable[[str], InputProcessor],
) -> tuple[SupervisedEngine, FrontEnd]:
    """The model loads in its process while the tokenizer and image processor load here."""
    loading = asyncio.create_task(asyncio.to_thread(load_processor, engine_config.model))
    try:
        engine = await SupervisedEngine.start(engine_config, tell=log.warning, command=engine_command)
    except BaseException:
        # The engine's word counts; what the processor has to say of the same model is the same or less.
        await asyncio.wait({loading})
        loading.exception()
        raise
    try:
        front_end = FrontEnd(engine, await loading, server_config, model)
        front_end.streams.held = lambda: engine.starting
        engine.changed = front_end.engine_changed
        await front_end.register_adapters(adapters)
    except BaseException:
        await engine.close()
        raise
    return engine, front_end


def _threads(number: int, config: EngineConfig) -> str:
    """What a step computes with."""
    ranks = f" on each of {config.tensor_parallel} ranks" if config.tensor_parallel > 1 else ""
    return f"{number} thread{'s' * (number != 1)}{ranks}"


def _load_processor(model: str) -> InputProcessor:
    from transformers.utils import logging

    from vlora.models.processing import InputProcessor
    from vlora.threads import compute_alone

    # The engine process has the cores. What one thread sets holds for those that compute later, too.
    compute_alone()
    logging.set_verbosity_error()  # what is wrong with a request is told to who sent it
    return InputProcessor.from_pretrained(model)


async def _first(task: asyncio.Task[object], stop: asyncio.Event) -> asyncio.Task[object] | None:
    """Wait for the task, or give it up (None) when `stop` is set first."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task
    task.cancel()
    await asyncio.wait({task})
    return None


def _reload_tokens(
    access: Access, config: ServerConfig, read_tokens: Callable[[], tuple[Token, ...]], announce: Callable[[str], None]
) -> None:
    try:
        tokens = dataclasses.replace(config, tokens=read_tokens()).tokens  # checked together, as at start
        access.replace(tokens)
    except BadConfig as error:
        log.warning("the tokens stay as they were: %s", error)
    else:
        announce(f"tokens: {', '.join(token.name for token in tokens)}")
