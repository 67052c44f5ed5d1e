"""`SupervisedEngine`: an engine process that is restarted with its adapters when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from vlora.config import EngineConfig, Token
from vlora.engine.interface import EngineInterface
from vlora.engine.ipc.client import ENGINE_COMMAND, EngineClient
from vlora.engine.operations import GetSnapshot, LoadAdapter, RegisterAdapters, Train
from vlora.errors import BadConfig, EngineDead, VLoraError
from vlora.operations import GetStats, Operation, PinAdapter, UnloadAdapter
from vlora.types import Request, RequestOutput

_MOST_STARTS = 5  # in a row that ended early
_LASTING_S = 60.0
FIRST_PAUSE_S = 0.5  # before the second start in a row; each later pause is twice as long


class RestartedEngine(EngineInterface, Protocol):
    """An engine that is replaced when it dies.

    on_change: called when a new process is ready, or no more restarts are attempted.
    """

    on_change: list[Callable[[], object]]

    @property
    def cause(self) -> str | None:
        """Why no engine is ready; None while one is."""
        ...

    @property
    def starting(self) -> bool:
        """Whether no engine is ready but one is starting."""
        ...


class SupervisedEngine(EngineInterface):
    """`EngineInterface` over successive engine processes; created by `start`.

    When an engine process dies, pending and new requests fail with the cause until a replacement is ready. The
    replacement has the adapters that were registered or loaded, under their names, and the same pins, and trainings
    continue. It starts at once; if starts fail repeatedly, the pauses grow, and after the fifth the engine stays dead.
    """

    def __init__(
        self, engine: EngineClient, config: EngineConfig, command: Sequence[str], log: Callable[[str], None]
    ) -> None:
        self.on_change: list[Callable[[], object]] = []
        self._engine: EngineClient | None = engine
        self._config = config
        self._command = command
        self._log = log
        self._cause = ""
        self._paths: dict[str, str] = {}
        self._plans = dict.fromkeys([] if config.train is None else [config.train])  # of trainings, in order
        self._pinned: set[str] = set()
        self._unloaded: set[str] = set()
        self._num_restarts = 0
        self._gave_up = False
        self._watching = asyncio.create_task(self._watch(engine), name="vlora-engine-supervisor")

    @classmethod
    async def start(
        cls, config: EngineConfig, *, log: Callable[[str], None], command: Sequence[str] = ENGINE_COMMAND
    ) -> SupervisedEngine:
        """See EngineClient. log: called with a log line when the engine dies and with the outcome of each restart."""
        return cls(await EngineClient.start(config, command=command), config, command, log)

    @property
    def cause(self) -> str | None:
        """Why no engine is ready; None while one is."""
        return self._cause if self._engine is None else self._engine.cause

    @property
    def pid(self) -> int | None:
        """The process id of the current engine; None while no engine is ready."""
        return None if self._engine is None else self._engine.ready.pid

    @property
    def starting(self) -> bool:
        """Whether no engine is ready but one is starting."""
        return self.cause is not None and not self._gave_up

    # -- EngineInterface ----------------------------------------------------------------------------------------------

    def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        return self._alive().generate(request, until)

    async def cancel(self, request_id: str) -> None:
        await self._alive().cancel(request_id)

    async def call(self, operation: Operation) -> Any:
        """See EngineInterface. Adapters, pins and trainings are restored after a restart, and counters restart."""
        found = await self._alive().call(operation)
        match operation:
            case RegisterAdapters(paths):
                self._paths |= paths
                self._unloaded -= paths.keys()
            case LoadAdapter(name, path):
                self._paths[name] = path
                self._unloaded.discard(name)
            case UnloadAdapter(name):
                self._paths.pop(name, None)
                self._pinned.discard(name)
                self._unloaded.add(name)
            case PinAdapter(name, pinned):
                (self._pinned.add if pinned else self._pinned.discard)(name)
            case Train(plan):
                # Those of learning adapters are removed when they have ended.
                self._unloaded -= {one.name for one in found}
                self._plans = {known: None for known in self._plans if os.path.exists(known)} | {plan: None}
            case GetStats():
                return msgspec.structs.replace(found, num_restarts=self._num_restarts)
            case GetSnapshot():
                stats = msgspec.structs.replace(found.stats, num_restarts=self._num_restarts)
                return msgspec.structs.replace(found, stats=stats)
        return found

    def replace_base_tokens(self, tokens: tuple[Token, ...]) -> None:
        """Admit clients of the base model with these tokens from now on, also after a restart."""
        if (base := self._config.serve_base) is None:
            return
        self._config = dataclasses.replace(self._config, serve_base=dataclasses.replace(base, tokens=tokens))
        if self._engine is not None:
            self._engine.replace_base_tokens(tokens)

    async def close(self) -> None:
        """See EngineInterface. Stops restarting."""
        self._gave_up = True
        self._watching.cancel()
        await asyncio.wait({self._watching})
        if self._engine is not None:
            await self._engine.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        for call in self.on_change:
            call()

    def _alive(self) -> EngineClient:
        if self._engine is None:
            raise EngineDead(self._cause)
        return self._engine

    async def _watch(self, engine: EngineClient) -> None:
        num_starts = 0
        while True:
            started = time.monotonic()
            died = await engine.wait_dead()
            num_starts = 1 if time.monotonic() - started >= _LASTING_S else num_starts + 1
            self._engine, self._cause = None, f"{died}; it is being restarted"
            self._log(self._cause)
            await engine.close()
            while True:
                if num_starts > _MOST_STARTS:
                    self._cause = f"{died}; gave up after {_MOST_STARTS} failed starts"
                    self._gave_up = True
                    self._log(self._cause)
                    self._notify()
                    return
                if num_starts > 1:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (num_starts - 2))
                try:
                    engine = await self._start_again()
                    break
                except Exception as error:  # of any kind: without this task, no engine would start again
                    died = str(error) if isinstance(error, VLoraError | OSError) else f"{type(error).__name__}: {error}"
                    num_starts += 1
                    self._log(f"{died}; retrying")
            self._num_restarts += 1
            self._engine = engine
            if (base := self._config.serve_base) is not None:
                engine.replace_base_tokens(base.tokens)  # they may have been replaced while it started
            self._log("the engine is ready again")
            self._notify()

    async def _start_again(self) -> EngineClient:
        # A plan that can no longer be read does not keep the engine from serving.
        config = dataclasses.replace(self._config, train=None)
        try:
            engine = await EngineClient.start(config, command=self._command)
        except BadConfig as error:
            if config.serve_base is None:
                raise
            # Nor does an address that another process has taken meanwhile.
            self._log(f"starting without --serve-base: {error}")
            engine = await EngineClient.start(dataclasses.replace(config, serve_base=None), command=self._command)
        try:
            await self._restore(engine)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _restore(self, engine: EngineClient) -> None:
        """Restore adapters and trainings of the old process in a new one; log and forget what cannot be restored."""
        for plan in tuple(self._plans):
            if not await self._try(engine.call(Train(plan, reopen=False)), f"the trainings of {plan} do not continue"):
                del self._plans[plan]
        trained = {status.name for status in await engine.adapters()} if self._unloaded else set()
        for name in self._unloaded & trained:
            await self._try(engine.unload_adapter(name), f"adapter {name!r} is served again")
        for name, path in tuple(self._paths.items()):
            if not await self._try(engine.register_adapters({name: path}), f"adapter {name!r} was not restored"):
                del self._paths[name]
                self._pinned.discard(name)
        for name in tuple(self._pinned):
            if not await self._try(engine.pin_adapter(name, True), f"adapter {name!r} is no longer pinned"):
                self._pinned.discard(name)

    async def _try(self, call: Coroutine[Any, Any, object], failure: str) -> bool:
        """Returns whether a call succeeded; if not, its error is logged. Raises EngineDead."""
        try:
            await call
        except EngineDead:
            raise
        except VLoraError as error:
            self._log(f"{failure}: {error}")
            return False
        return True
