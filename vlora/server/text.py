"""Tokens to text, piece by piece: no broken characters, no piece twice, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding half a character gives


class Detokenizer:
    """Incremental decoding. Tokens are decoded with those of the piece before, which tokenizers need for spaces."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._context = 0  # tokens[context:done] were the last piece
        self._done = 0  # tokens[:done] were handed out

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became certain; empty while the last character is incomplete."""
        self._token_ids += token_ids
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        self._context, self._done = self._done, len(self._token_ids)
        return text

    def finish(self) -> str:
        """What is left when no token follows: an incomplete character shows as the replacement character."""
        text = self._pending()
        self._done = len(self._token_ids)
        return text

    def _pending(self) -> str:
        before = self._decode(self._token_ids[self._context : self._done])
        return self._decode(self._token_ids[self._context :])[len(before) :]


class StopFilter:
    """Passes text on up to the first stop string; holds back an end that may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that cannot be part of a stop string. After a stop string was met, always empty."""
        if self.stopped:
            return ""
        self._held += text
        found = [(self._held.find(stop), len(stop)) for stop in self._stop if stop in self._held]
        if found:
            # The one that is complete first: so the cuts between pieces make no difference.
            self.stopped = True
            return self._release(min(found, key=lambda match: (sum(match), match[0]))[0])
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return "" if self.stopped else self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop) - 1, len(self._held)) + 1)
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class AnswerText:
    """The text of one answer as its tokens arrive."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stop)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """A stop string was met; the answer is complete."""
        return self._filter.stopped

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._pieces)

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._keep(self._filter.feed(self._detokenizer.feed(token_ids)))

    def finish(self) -> str:
        return self._keep(self._filter.feed(self._detokenizer.finish()) + self._filter.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
