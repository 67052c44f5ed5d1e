"""Compiled grammars, and the requests that wait for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from vlora.errors import BadRequest, VLoraError
from vlora.models.grammar import Grammar, GrammarCompiler
from vlora.threads import background_executor

_MOST_KEPT = 16  # compiled; a hostile grammar may take tens of megabytes


class Grammars:
    """Compiles each grammar once, in a background thread, and keeps the most recently used ones."""

    def __init__(self, compiler: GrammarCompiler, executor: Executor | None = None) -> None:
        """executor: compiles grammars; None creates a thread."""
        self._compiler = compiler
        self._executor = executor or background_executor("vlora-grammar")
        self._known: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._waiting: dict[str, Future[Grammar]] = {}  # by request id

    @property
    def pending(self) -> tuple[Future[Grammar], ...]:
        """Futures that requests wait for."""
        return tuple(self._waiting.values())

    def wait_for(self, request_id: str, grammar: str) -> None:
        """Let `collect` return this request's grammar, or the error in it."""
        if grammar not in self._known or self._known[grammar].cancelled():
            self._known[grammar] = self._executor.submit(self._compiler.compile, grammar)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        self._waiting[request_id] = self._known[grammar]

    def collect(self) -> Iterator[tuple[str, Grammar | VLoraError]]:
        """Requests with a compiled or invalid grammar, each once."""
        for request_id in [each for each, future in self._waiting.items() if future.done()]:
            future = self._waiting.pop(request_id)
            error = future.exception()
            if error is None:
                yield request_id, future.result()
            elif isinstance(error, VLoraError):
                yield request_id, error
            else:
                yield request_id, BadRequest(f"the grammar cannot be used: {type(error).__name__}: {error}")

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, and cancel a queued compilation that no other request waits for.

        Unknown ids are ignored.
        """
        future = self._waiting.pop(request_id, None)
        if future is not None and future not in self._waiting.values():
            future.cancel()

    def close(self) -> None:
        """Stop compiling."""
        self._executor.shutdown(wait=False, cancel_futures=True)
