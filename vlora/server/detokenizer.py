"""Incremental detokenization: no broken characters, no repeated text, and no part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from vlora.client.values import TokenLogprob
from vlora.types import TokenScore

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # the result of decoding an incomplete character


class Detokenizer:
    """Incremental decoding. Tokens are decoded together with the previous piece, which tokenizers need for spaces."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._context = 0  # tokens[context:done] are the last piece
        self._done = 0  # tokens[:done] are decoded

    def feed(self, token_ids: Sequence[int]) -> str:
        """The newly decoded text; empty while the last character is incomplete."""
        self._token_ids += token_ids
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        self._context, self._done = self._done, len(self._token_ids)
        return text

    def finish(self) -> str:
        """The remaining text at the end; an incomplete character becomes the replacement character."""
        if self._done == len(self._token_ids):
            return ""
        text = self._pending()
        self._done = len(self._token_ids)
        return text

    def _pending(self) -> str:
        before = self._decode(self._token_ids[self._context : self._done]) if self._done else ""
        return self._decode(self._token_ids[self._context :])[len(before) :]


class StopFilter:
    """Passes text through up to the first stop string; holds back a suffix that may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that cannot be part of a stop string; always empty after a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [(self._held.find(stop), len(stop)) for stop in self._stop if stop in self._held]
        if found:
            # The match that ends first wins, so piece boundaries do not change the result.
            self.stopped = True
            return self._release(min(found, key=lambda match: (sum(match), match[0]))[0])
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """Release the held text at the end of the answer."""
        return "" if self.stopped else self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        return max((self._matched_prefix(stop) for stop in self._stop), default=0)

    def _matched_prefix(self, stop: str) -> int:
        start = max(0, len(self._held) - len(stop) + 1)
        while (start := self._held.find(stop[0], start)) >= 0:
            if stop.startswith(self._held[start:]):
                return len(self._held) - start
            start += 1
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class Piece(NamedTuple):
    """Released text, with its tokens where the request asks for log probabilities.

    num_prompt_tokens, num_completion_tokens: the request's totals up to this piece.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class AnswerText:
    """The text of one answer as its tokens arrive.

    token_text: decodes a single token, as logprobs show it. token_bytes: of a token in an answer; None for one that
    answers do not contain. min_tokens: stop strings are ignored in the text of this many first tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        token_text: Callable[[int], str],
        stop: Sequence[str],
        min_tokens: int = 0,
        token_bytes: Callable[[int], bytes | None] = lambda _: None,
    ) -> None:
        self.num_tokens = 0  # up to the one that completed a stop string
        self._unsearched = min_tokens if stop else 0
        self._one_by_one = bool(stop)
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stop)
        self._token_text = token_text
        self._token_bytes = token_bytes
        self._pieces: list[Piece] = []
        self._decoded = 0  # characters decoded
        self._released = 0  # characters released
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # (start of the token's text, token)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, which completes the answer."""
        return self._filter.stopped

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self._pieces)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The tokens with at least one character in `text`; the token that ended the answer is not one of them."""
        return tuple(token for piece in self._pieces for token in piece.logprobs)

    def feed(self, token_ids: Sequence[int], scores: Sequence[TokenScore] = ()) -> Piece:
        """The newly released text, possibly empty. scores: empty, or one per token."""
        text = ""
        # Only a text in which no stop string is searched and no token has a score is decoded together.
        parts = [(token_id,) for token_id in token_ids] if scores or self._one_by_one else [token_ids] * bool(token_ids)
        for place, part in enumerate(parts):
            if self.stopped:  # tokens that came in one message with the one that completed the stop string
                break
            if scores:
                self._waiting.append((self._decoded, self._to_logprob(part[0], scores[place])))
            decoded = self._detokenizer.feed(part)
            self._decoded += len(decoded)
            text += decoded if self._unsearched else self._filter.feed(decoded)
            self._unsearched = max(0, self._unsearched - len(part))
            self.num_tokens += len(part)
        return self._release(text)

    def finish(self) -> Piece:
        """Release the held text at the end of the answer."""
        return self._release(self._filter.feed(self._detokenizer.finish()) + self._filter.finish())

    def _release(self, text: str) -> Piece:
        self._released += len(text)
        tokens = []
        while self._waiting and self._waiting[0][0] < self._released:
            tokens.append(self._waiting.popleft()[1])
        if text and not self._pieces:
            _strip_first_space(tokens, text)
        piece = Piece(text, tuple(tokens))
        if text:
            self._pieces.append(piece)
        return piece

    def _to_logprob(self, token_id: int, score: TokenScore) -> TokenLogprob:
        others = [other for other, _ in score.top]
        return TokenLogprob(
            token=self._token_text(token_id),
            logprob=score.logprob,
            top=tuple((self._token_text(other), logprob) for other, logprob in score.top),
            data=self._token_bytes(token_id),
            top_data=tuple(map(self._token_bytes, others)),
        )


def _strip_first_space(tokens: list[TokenLogprob], text: str) -> None:
    """Remove the space before the first word that decoders of SentencePiece drop from a text."""
    if b"".join(token.data or b"" for token in tokens).startswith(f" {text}".encode()):
        place, data = next((place, token.data) for place, token in enumerate(tokens) if token.data)
        tokens[place] = msgspec.structs.replace(tokens[place], token=tokens[place].token[1:], data=data[1:])
