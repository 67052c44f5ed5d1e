"""Compiled grammars, and the requests that are held until theirs is compiled."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future

from vlora.errors import BadRequest, VLoraError
from vlora.models.grammar import Cursor, Grammar, GrammarCompiler
from vlora.orchestrator.scheduler import Scheduler
from vlora.threads import background_executor
from vlora.types import ErrorValue, Request, RequestOutput

_MOST_KEPT = 16  # compiled; a hostile grammar may take tens of megabytes


class GrammarCache:
    """Compiles each grammar once, in a background thread, and keeps the most recently used ones."""

    def __init__(self, compiler: GrammarCompiler, executor: Executor | None = None) -> None:
        """executor: compiles grammars; None creates a thread."""
        self._compiler = compiler
        self._executor = executor or background_executor("vlora-grammar")
        self._compilations: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._waiting: dict[str, Future[Grammar]] = {}  # by request id

    @property
    def pending(self) -> tuple[Future[Grammar], ...]:
        return tuple(self._waiting.values())

    def compile_for(self, request_id: str, grammar: str) -> None:
        """Start to compile a grammar unless it is known; `collect` returns it, or the error in it."""
        if grammar not in self._compilations or self._compilations[grammar].cancelled():
            self._compilations[grammar] = self._executor.submit(self._compiler.compile, grammar)
            if len(self._compilations) > _MOST_KEPT:
                self._compilations.popitem(last=False)
        self._compilations.move_to_end(grammar)
        self._waiting[request_id] = self._compilations[grammar]

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
        self._executor.shutdown(wait=False, cancel_futures=True)


def grammar_of(request: Request) -> str | None:
    """The grammar that a request's answer must match; an answer in one pass has none."""
    return None if request.in_one_pass else request.sampling.grammar


@dataclasses.dataclass(eq=False)
class GrammarHook:
    """Releases requests to the scheduler when their grammar is compiled."""

    cache: GrammarCache
    scheduler: Scheduler
    begin_grammar: Callable[[str, Cursor], None]

    def __post_init__(self) -> None:
        self._answered: dict[str, tuple[int, ...]] = {}  # of resumed requests

    def add(self, request: Request) -> None:
        """Start to compile the grammar of a request that the scheduler holds."""
        grammar = grammar_of(request)
        if grammar is not None:
            self.cache.compile_for(request.request_id, grammar)
            if request.answered:
                self._answered[request.request_id] = request.answered

    def release_compiled(self) -> list[RequestOutput]:
        """Release requests with a compiled grammar; return the last outputs of those with an invalid one.

        The answer of a resumed request is ended too if it does not match its grammar so far.
        """
        outputs: list[RequestOutput] = []
        for request_id, found in self.cache.collect():
            try:
                if isinstance(found, VLoraError):
                    raise found
                cursor = resumed(found, self._answered.pop(request_id, ()))
            except VLoraError as error:
                output = self.scheduler.fail(request_id, ErrorValue.of(error))
                outputs += [] if output is None else [output]
            else:
                self.begin_grammar(request_id, cursor)
                self.scheduler.release(request_id)
        return outputs

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self.cache.forget(request_id)
        self._answered.pop(request_id, None)


def resumed(grammar: Grammar, answered: Sequence[int]) -> Cursor:
    """The place in a grammar after these tokens of an answer. Raises BadRequest if they do not match it."""
    cursor = grammar.begin()
    for place, token in enumerate(answered):
        try:
            cursor.advance(token)
        except BadRequest as error:
            raise BadRequest(
                f"{len(answered)} answered tokens cannot be continued: the token at index {place} does not match the "
                "request's grammar",
                field="answered",
            ) from error
    return cursor
