"""Coalesces tokens into fewer messages: for answers that are read as a whole, and for streams with short steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from vlora.types import Request, RequestOutput, TokenScore

PACE_S = 0.04
"""Streamed tokens are sent at most once in this time (25 times a second) if steps are shorter."""

SEARCH_PACE_S = 0.01
"""The same for answers with stop strings, where tokens computed after the stop string are wasted."""


class OutputCoalescer:
    """Holds back the tokens of requests for whole answers (`Request.whole`), and briefly those of streams.

    A message costs the sender, the socket and the readers about the same regardless of its size, and much of the cost
    delays the next step, because the readers wake up while it runs. With steps of 1 to 2 ms, one message per step makes
    steps a tenth longer (docs/decisions/0034).

    A stream's first tokens and its end are never held, and each message includes the held tokens of all streams. Held
    tokens are sent before a step if one as long as the last would delay them beyond their pace.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        version_of: Callable[[str], str | None] = lambda request_id: None,
    ) -> None:
        """Start without requests.

        Args:
            clock: Seconds.
            version_of: The content hash of a request's adapter, which is sent with its first tokens.
        """
        self._clock = clock
        self._version_of = version_of
        self._held: dict[str, tuple[list[int], list[TokenScore]]] = {}
        self._whole: set[str] = set()
        self._searched: set[str] = set()
        self._started: set[str] = set()  # streams with their first tokens already sent
        self._sent_s = self._last_step_s = clock()

    def add(self, request: Request) -> None:
        """Hold the outputs of this request. If `whole`, all tokens are held until its last message."""
        if request.whole:
            self._whole.add(request.request_id)
        elif request.sampling.stop:
            self._searched.add(request.request_id)

    def coalesce(self, outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
        """The outputs to send now: of this step, and held ones that are due."""
        now_s = self._clock()
        step_s, self._last_step_s = now_s - self._last_step_s, now_s
        due: list[RequestOutput] = []
        for output in outputs:
            # Most outputs of a step are appended to held ones, on the shortest path (see EngineWorker.loop).
            if output.finish_reason is None and (held := self._held.get(output.request_id)) is not None:
                held[0].extend(output.token_ids)
                held[1].extend(output.scores)
            elif (now := self._hold_or_send(output)) is not None:
                due.append(now)
        due_s = now_s - self._sent_s + step_s
        if due or due_s > PACE_S or (due_s > SEARCH_PACE_S and not self._searched.isdisjoint(self._held)):
            due += self.flush()
        return tuple(due)

    def flush(self) -> tuple[RequestOutput, ...]:
        """Flush the held tokens of streams, because the next step may take long."""
        self._sent_s = self._clock()
        names = [name for name in self._held if name not in self._whole]
        return tuple(self._with_held(RequestOutput(request_id=name)) for name in names)

    def _hold_or_send(self, output: RequestOutput) -> RequestOutput | None:
        name = output.request_id
        if output.finished:
            self._whole.discard(name)
            self._searched.discard(name)
            self._started.discard(name)
            return self._with_held(output)
        if name not in self._whole and name not in self._started:
            self._started.add(name)
            return msgspec.structs.replace(output, adapter_version=self._version_of(name))
        self._held[name] = ([*output.token_ids], [*output.scores])
        return None

    def _with_held(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._held:
            return output
        token_ids, scores = self._held.pop(output.request_id)
        token_ids += output.token_ids
        scores += output.scores
        return msgspec.structs.replace(output, token_ids=tuple(token_ids), scores=tuple(scores))
