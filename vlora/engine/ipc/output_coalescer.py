"""Tokens gathered into fewer messages: answers that nobody reads before they are whole, and streams of short steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from vlora.types import Request, RequestOutput, TokenScore

PACE_S = 0.04
"""Streamed tokens are sent once in this time, where steps are shorter: as often as a film shows a picture."""

SEARCH_PACE_S = 0.01
"""So for answers with stop strings, which end when somebody has found one: what is computed until then is lost."""


class Gathering:
    """Holds back the tokens of requests that asked for whole answers (`Request.whole`), and those of streams for a
    moment.

    Each message costs the sender, the socket and the readers behind it about as much as any other, whatever is in it,
    and much of that is paid by the next step: they wake up beside it. Where a step takes a millisecond or two, a
    message for each makes it a tenth longer (docs/decisions.md, 2026-11-22).

    A stream's first tokens and its end are never held, and whatever is sent takes along all that streams have. What is
    held goes before another step as long as the last would make it wait for more than its pace.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._held: dict[str, tuple[list[int], list[TokenScore]]] = {}
        self._whole: set[str] = set()
        self._searched: set[str] = set()
        self._begun: set[str] = set()  # streams whose first tokens were sent
        self._sent_s = self._passed_s = clock()

    def expect(self, request: Request) -> None:
        """What comes of it is held from here on, as long as it says: if `whole`, until its last message, which then
        has all its tokens."""
        if request.whole:
            self._whole.add(request.request_id)
        elif request.sampling.stop:
            self._searched.add(request.request_id)

    def pass_on(self, outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
        """What is to be sent now, of what a step said and of what was held before."""
        now_s = self._clock()
        step_s, self._passed_s = now_s - self._passed_s, now_s
        passed: list[RequestOutput] = []
        for output in outputs:
            # Most of what a step says goes to what is held already, by the shortest way (see EngineWorker.loop).
            if output.finish_reason is None and (held := self._held.get(output.request_id)) is not None:
                held[0].extend(output.token_ids)
                held[1].extend(output.scores)
            elif (each := self._pass(output)) is not None:
                passed.append(each)
        due_s = now_s - self._sent_s + step_s
        if passed or due_s > PACE_S or (due_s > SEARCH_PACE_S and not self._searched.isdisjoint(self._held)):
            passed += self.release()
        return tuple(passed)

    def release(self) -> tuple[RequestOutput, ...]:
        """What is held of streams: to be sent now, since what comes next may take long."""
        self._sent_s = self._clock()
        names = [name for name in self._held if name not in self._whole]
        return tuple(self._with_held(RequestOutput(request_id=name)) for name in names)

    def _pass(self, output: RequestOutput) -> RequestOutput | None:
        name = output.request_id
        if output.finished:
            self._whole.discard(name)
            self._searched.discard(name)
            self._begun.discard(name)
            return self._with_held(output)
        if name not in self._whole and name not in self._begun:
            self._begun.add(name)
            return output
        self._held[name] = ([*output.token_ids], [*output.scores])
        return None

    def _with_held(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._held:
            return output
        token_ids, scores = self._held.pop(output.request_id)
        token_ids += output.token_ids
        scores += output.scores
        return msgspec.structs.replace(output, token_ids=tuple(token_ids), scores=tuple(scores))
