"""Which grammars are compiled, and which requests wait for theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from vlora.errors import BadRequest, VLoraError
from vlora.models.grammar import Grammar, GrammarCompiler
from vlora.threads import background_executor

_MOST_KEPT = 16  # compiled; each may take tens of megabytes if it is a hostile one


class Grammars:
    """Compiles each grammar once, in a thread beside the steps, and keeps those used last."""

    def __init__(self, compiler: GrammarCompiler, executor: Executor | None = None) -> None:
        """executor: compiles; None makes a thread."""
        self._compiler = compiler
        self._executor = executor or background_executor("vlora-grammar")
        self._known: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._waiting: dict[str, Future[Grammar]] = {}  # by request

    @property
    def pending(self) -> tuple[Future[Grammar], ...]:
        """What requests wait for."""
        return tuple(self._waiting.values())

    def wait_for(self, request_id: str, grammar: str) -> None:
        """`collect` will tell this request's grammar, or what is wrong with it."""
        if grammar not in self._known or self._known[grammar].cancelled():
            self._known[grammar] = self._executor.submit(self._compiler.compile, grammar)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        self._waiting[request_id] = self._known[grammar]

    def collect(self) -> Iterator[tuple[str, Grammar | VLoraError]]:
        """Requests whose grammar is there by now, each once."""
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
        """A request has ended; unknown ids are ignored. What nobody waits for any more is not begun."""
        future = self._waiting.pop(request_id, None)
        if future is not None and future not in self._waiting.values():
            future.cancel()

    def close(self) -> None:
        """Compile no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
