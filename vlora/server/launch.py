"""`vlora serve`: starts the engine process, registers the adapters, runs the front end, and shuts all of it down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_state import AdapterState, default_folder
from vlora.cluster.journal_file import JournalFile
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.cluster.on_ray.settings import RayOptions
from vlora.config import EngineConfig, ServerConfig, Token
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.engine.ipc.supervisor import RestartedEngine, SupervisedEngine
from vlora.errors import BadConfig, EngineDead, listed
from vlora.lazy import hidden
from vlora.logging_format import write_audit_log
from vlora.server.batches.store import FileStore
from vlora.server.frontend import FrontEnd
from vlora.server.received_adapters import ReceivedAdapters
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access
from vlora.server.streams.cameras import TENANT, Cameras
from vlora.wire.tls import server_context

if TYPE_CHECKING:
    from vlora.learning.plan import LearningEntry
    from vlora.models.processing import InputProcessor
    from vlora.server.http.server import HttpServer

log = logging.getLogger(__name__)

_NAMES_SHOWN = 20  # adapter names in the "ready" line


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
    replicas: int = 1,
    ray: RayOptions | None = None,
    learn: tuple[Path, list[LearningEntry]] | None = None,
    adapter_state: str | None = None,
    shipping: ShippingLimits | None = None,
    routing_rule: str = "placed",
    routing_journal: str | None = None,
    **cluster: Any,
) -> None:
    """Serve until interrupted or terminated, then drain.

    An engine that dies is restarted. The front end stays up, so clients receive the cause and streams continue.

    Args:
        announce: Called with the "ready" line, with lines about replicas before it, and with the token names after a
            reload.
        read_tokens: Reads the tokens again on SIGHUP; None where they cannot change.
        ray: Where several engines run; None: one in a process of this machine, without Ray.
        learn: The folder and the adapters of a learning plan.
        adapter_state: The folder that keeps the adapters, as changed while it serves; "none" keeps them in memory, None
            in a folder of the address and model.
        shipping: Limits of adapters that are sent to replicas, uploaded, or found at a source.
        cluster: Of several engines, see `RayCluster.start`.

    Raises:
        BadConfig: The model, a setting, the address or the state is invalid.
        BadAdapter: An adapter cannot be registered.
        EngineDead: There is no engine at the end.
    """
    limits = shipping or ShippingLimits()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tls = server_context(server_config)
    access = Access(server_config.tokens)
    if server_config.audit_log is not None:
        try:
            write_audit_log(server_config.audit_log)
        except OSError as error:
            raise BadConfig(f"cannot write the audit log {error.filename!r}: {error.strerror}") from error
    on_tokens: list[Callable[[tuple[Token, ...]], None]] = [access.replace]
    if read_tokens is not None:
        loop.add_signal_handler(signal.SIGHUP, _reload_tokens, server_config, read_tokens, on_tokens, announce)
    if tls is None and not server_config.on_loopback:
        log.warning(
            "TLS is off: tokens and images sent to %s can be read on the network; set --tls-cert and --tls-key",
            server_config.host,
        )
    model = model_name or engine_config.model
    given = frozenset(adapters)
    async with contextlib.AsyncExitStack() as at_end:
        # Bind the address first, so that a port in use is reported before the model loads.
        rpyc_server = RpycServer(server_config.host, server_config.rpyc_port, server_config.max_message_bytes, tls)
        # In a thread, because this loop produces the last replies.
        at_end.push_async_callback(asyncio.to_thread, rpyc_server.close)
        state = _open_state(adapter_state, engine_config.model, rpyc_server, server_config)
        if state is not None:
            at_end.callback(state.close)
            adapters = starting_adapters(state, adapters, [] if learn is None else learn[1], model, announce)
        http_server: HttpServer | None = None
        files: FileStore | None = None
        if server_config.http_port is not None:
            from vlora.server.http.routes import make_app
            from vlora.server.http.server import HttpServer

            folder = server_config.file_folder or ("none" if state is None else f"{state.folder}/files")
            if folder != "none":
                files = FileStore(Path(folder), server_config)
                at_end.callback(files.close)
            http_server = HttpServer(server_config)
            at_end.push_async_callback(http_server.close)

        async def start_engine() -> RestartedEngine:
            if ray is None:
                return await SupervisedEngine.start(engine_config, log=log.warning, command=engine_command)
            journal = None if routing_journal is None else JournalFile(routing_journal)
            settings = {"model_name": model, "adapters": state, "rule": routing_rule, "shipping": limits, **cluster}
            more: dict[str, Any] = {"command": engine_command, "journal": journal, "announce": announce, **settings}
            return await RayCluster.start(engine_config, replicas, ray, **more)

        load = functools.partial(load_processor or _load_processor, engine_config.model)
        starting = asyncio.create_task(_start(start_engine, load, server_config, model, adapters, learn, state))
        if await _first_done(starting, stop) is None:
            return
        engine, front_end = starting.result()
        if isinstance(engine, RayCluster):
            front_end.adapters.paths.update({name: each.path for name, each in engine.desired_adapters.items()})
        received = None if state is None or state.folder is None else state.folder / "received"
        front_end.received = ReceivedAdapters(server_config, limits, received, front_end.adapters, given)
        on_tokens.append(front_end.quotas.replace)
        if isinstance(engine, SupervisedEngine):
            on_tokens.append(engine.replace_base_tokens)
        for use in on_tokens[1:]:
            use(access.tokens)  # they may have been reloaded while the engine started
        rpyc_server.start_in_thread(front_end, loop, model, access)
        if server_config.camera_hosts or server_config.camera_paths:
            secret = secrets.token_hex()
            camera_server = RpycServer("127.0.0.1", 0, server_config.max_message_bytes)
            at_end.push_async_callback(asyncio.to_thread, camera_server.close)
            own = Access((Token(name=TENANT, secret=secret),))
            camera_server.start_in_thread(front_end, loop, model, own)
            variables = {"VLORA_SERVER": f"127.0.0.1:{camera_server.port}", "VLORA_TOKEN": secret}
            kept_in = None if state is None else state.folder
            if server_config.camera_sinks and kept_in is not None:
                variables["VLORA_CAMERA_SINKS"] = str(kept_in / "camera-sinks")
            front_end.cameras = Cameras(server_config, kept_in, variables)
        if http_server is not None:
            http_server.start(make_app(front_end, model, access, lambda: rpyc_server.listening, files))
        web = f" | {'http' if tls is None else 'https'} {http_server.address}" if http_server else ""
        named = adapters if state is None else state.adapters
        names = ", ".join(sorted(named)) or "none"
        if len(named) > _NAMES_SHOWN:
            names = f"{len(named)} (`vlora adapters` lists them)"
        rpyc = f"{'rpyc' if tls is None else 'rpyc+tls'} {rpyc_server.host}:{rpyc_server.port}"
        # Objects that exist now are permanent; a full collection would scan them during requests.
        gc.freeze()
        at_end.callback(gc.unfreeze)  # otherwise libraries report leaks at exit
        table, threads = "", "threads unknown"
        with contextlib.suppress(EngineDead):  # the engine is restarting
            stats = await engine.stats()
            table, threads = stats.atmm_table, _threads(stats.num_threads, engine_config)
        announce(f"ready: {rpyc}{web} | model {model} | {threads} | adapters: {names}")
        if table:
            announce(f"ATMM table: {table}")
        if (base := engine_config.serve_base) is not None:
            announce(f"base model {base.name} on {', '.join(base.addresses)}")
        await stop.wait()
        stop.clear()
        await _first_done(asyncio.create_task(front_end.drain()), stop)
        # While a replacement engine starts, the failure is not final.
        cause = None if engine.starting else engine.cause
        await front_end.close()
        await engine.close()
        if cause is not None:
            raise EngineDead(cause)


async def _start(
    start_engine: Callable[[], Awaitable[RestartedEngine]],
    load_processor: Callable[[], InputProcessor],
    server_config: ServerConfig,
    model: str,
    adapters: Mapping[str, str],
    learn: tuple[Path, list[LearningEntry]] | None,
    state: AdapterState | None,
) -> tuple[RestartedEngine, FrontEnd]:
    """Load the model in the engine processes and, concurrently, the tokenizer and image processor here."""
    loading = asyncio.create_task(asyncio.to_thread(load_processor))
    try:
        engine = await start_engine()
    except BaseException:
        # Report the engine's error; the processor's error about the same model adds nothing.
        await asyncio.wait({loading})
        loading.exception()
        raise
    front_end: FrontEnd | None = None
    try:
        front_end = FrontEnd(engine, await loading, server_config, model, supervisor=engine)
        engine.on_change.append(front_end.engine_changed)
        if learn is not None:
            await asyncio.to_thread(importlib.import_module, "vlora.learning.learning")  # imports torch
        learned = {} if learn is None else front_end.learn(*learn, adapters)
        if isinstance(engine, RayCluster):  # it may have taken over the adapters of another front end
            adapters = {name: path for name, path in adapters.items() if name not in engine.desired_adapters}
        await front_end.adapters.register({**adapters, **learned})
        if state is not None and isinstance(engine, SupervisedEngine):  # a cluster keeps its state itself
            await front_end.adapters.keep_in(state, {name: adapters[name] for name in adapters.keys() - learned.keys()})
        if front_end.learning is not None:
            await front_end.learning.start()
    except BaseException:
        if front_end is not None:
            await front_end.close()
        await engine.close()
        raise
    return engine, front_end


def _open_state(folder: str | None, model: str, bound: RpycServer, config: ServerConfig) -> AdapterState | None:
    """The state of the adapters; None without one. Raises BadConfig for a folder that was given and cannot be used."""
    if folder == "none" or (folder is None and not config.rpyc_port):  # such a port is another one at each start
        return None
    try:
        if folder is not None:
            return AdapterState.open(folder)
        default = default_folder(os.environ, model, bound.host, bound.port)
        default.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = AdapterState.open(default)
    except (BadConfig, OSError) as error:
        if folder is not None:
            raise
        log.warning("adapters that are loaded while it serves will not outlive it: %s; set --adapter-state", error)
        return None
    log.info("adapters are kept in %s", default)
    return state


def starting_adapters(
    state: AdapterState,
    given: Mapping[str, str],
    learning: Sequence[LearningEntry],
    model: str,
    announce: Callable[[str], None],
) -> Mapping[str, str]:
    """The folders to register at a start, beside those of the state that it was not given. Adapters that learn are not
    in the state. Raises BadConfig for the model's name."""
    learned = {entry.settings.name for entry in learning}
    own = {name: path for name, path in given.items() if name not in learned}
    starting = state.begin(own)
    if model in state.adapters:
        raise BadConfig(
            f"the adapters' state in {state.folder} has an adapter {model!r}, which is the base model's name; give "
            "another --served-model-name"
        )
    for line in starting.lines:
        announce(line)
    if restored := state.adapters.keys() - own.keys():
        announce(f"adapters loaded later, kept in {state.folder}: {listed(restored)}")
    return {name: path for name, path in given.items() if name in learned or name in starting.new}


def _threads(number: int, config: EngineConfig) -> str:
    """The number of compute threads, for the "ready" line."""
    ranks = f" on each of {config.tensor_parallel} ranks" if config.tensor_parallel > 1 else ""
    return f"{number} thread{'s' * (number != 1)}{ranks}"


def _load_processor(model: str) -> InputProcessor:
    torchvision = importlib.util.find_spec("torchvision") is not None  # only its image processors need torch
    logging.getLogger("transformers").disabled = True  # it logs that there is no torch
    with hidden(*([] if torchvision else ["torch"])):
        from vlora.models.processing import InputProcessor

        logging.getLogger("transformers").setLevel(logging.ERROR)  # request errors go to the client, not to the log
        if torchvision:
            from vlora.threads import compute_alone

            compute_alone()  # the engine process has the cores; the setting applies to threads that start later, too
        return InputProcessor.from_pretrained(model)


async def _first_done(task: asyncio.Task[object], stop: asyncio.Event) -> asyncio.Task[object] | None:
    """Wait for the task, or cancel it and return None when `stop` is set first."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task
    task.cancel()
    await asyncio.wait({task})
    return None


def _reload_tokens(
    config: ServerConfig,
    read_tokens: Callable[[], tuple[Token, ...]],
    uses: Sequence[Callable[[tuple[Token, ...]], None]],
    announce: Callable[[str], None],
) -> None:
    try:
        tokens = dataclasses.replace(config, tokens=read_tokens()).tokens  # checks all tokens together
        for use in uses:
            use(tokens)
    except BadConfig as error:
        log.warning("tokens not reloaded: %s", error)
    else:
        announce(f"tokens: {', '.join(token.name for token in tokens)}")
