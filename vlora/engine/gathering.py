"""Answers that nobody reads before they are whole, in one message."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vlora.types import RequestOutput, TokenScore


class Gathering:
    """Holds back the tokens of requests that asked for whole answers (`Request.whole`); passes all else on.

    Each message costs the sender, the socket and the reader about as much as any other, whatever is in it.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[list[int], list[TokenScore]]] = {}

    def hold(self, request_id: str) -> None:
        """From here on, until its last message, which has all its tokens."""
        self._held[request_id] = ([], [])

    def pass_on(self, outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
        """What is to be sent now."""
        return tuple(passed for output in outputs if (passed := self._pass(output)) is not None)

    def _pass(self, output: RequestOutput) -> RequestOutput | None:
        held = self._held.get(output.request_id)
        if held is None:
            return output
        token_ids, scores = held
        token_ids += output.token_ids
        scores += output.scores
        if not output.finished:
            return None
        del self._held[output.request_id]
        return msgspec.structs.replace(output, token_ids=tuple(token_ids), scores=tuple(scores))
