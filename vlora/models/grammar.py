"""Answers held to a grammar: which tokens may come next, by llguidance, an optional extra of the package.

A grammar is text in llguidance's form of Lark; nothing here knows what it describes. Masks are made as the answer goes,
so compiling costs milliseconds, and the limits below bound what a hostile grammar can cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from vlora.errors import BadRequest
from vlora.models.pretrained import from_pretrained

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms for a mask
    "step_max_items": 50_000,  # about 3 ms for a mask
    "max_lexer_states": 20_000,  # 1 to 2 KiB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_MOST_REASON = 300  # characters
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars for one model's tokens. Its tokenizer is read with the first one. One thread at a time."""

    def __init__(self, model: str, num_tokens: int, eos_ids: Iterable[int]) -> None:
        """model: where the tokenizer is. num_tokens: width of the logits."""
        self._model = model
        self._num_tokens = num_tokens
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: Any = None
        self._preamble = ""
        self._never_first: np.ndarray | None = None

    def compile(self, grammar: str) -> Grammar:
        """Raises BadRequest, with the reason, for a grammar that cannot be served."""
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise BadRequest(
                "this server holds no answer to a grammar: it lacks llguidance (pip install 'vlora[grammar]')"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        matcher = LLMatcher(self._tokenizer, self._preamble + grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise BadRequest(f"the grammar cannot be used: {_reason(matcher)}")
        return Grammar(matcher, self._num_tokens, self._never_first)

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        try:
            tokenizer = from_pretrained(AutoTokenizer, self._model)
            backend: Any = tokenizer.backend_tokenizer
            if type(backend.decoder).__name__ == "WordPiece":
                # Where only one text can follow, the library would take the tokens that the tokenizer makes of it on
                # its own: here that is another text.
                self._preamble = _UNFORCED
                pieces: Any = _WordPieces(tokenizer, backend.decoder.prefix)
                self._never_first = pieces.continues
                return LLTokenizer(pieces, eos_token=self._eos_ids)
            return LLTokenizer(backend.to_str(), eos_token=self._eos_ids)
        except (OSError, ValueError, AttributeError) as error:
            raise BadRequest(f"no answer of this model can be held to a grammar: {error}") from error


class Grammar:
    """A compiled grammar, from which any number of answers begin. never_first: tokens that none of them begins with."""

    def __init__(self, matcher: Any, num_tokens: int, never_first: np.ndarray | None = None) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._never_first = never_first

    def begin(self) -> Cursor:
        return Cursor(self._matcher.deep_copy(), self._num_tokens, self._never_first)


class Cursor:
    """One answer's place in its grammar."""

    def __init__(self, matcher: Any, num_tokens: int, never_next: np.ndarray | None = None) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._never_next = never_next

    def allowed(self) -> np.ndarray:
        """bool [num_tokens]: which may come next; the end of the answer is one of them where it may be over.

        Raises BadRequest when there is none, or when finding them takes too much.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            if _reason(self._matcher).startswith("NoExtension"):
                raise _no_way_on()
            raise BadRequest(f"the answer cannot be held to its grammar any further: {_reason(self._matcher)}")
        allowed = np.zeros(self._num_tokens, dtype=bool)
        known = min(len(bits), self._num_tokens)
        allowed[:known] = bits[:known]
        if self._never_next is not None:
            allowed[self._never_next] = False
        if not allowed.any():
            raise _no_way_on()
        return allowed

    def advance(self, token: int) -> None:
        """Take the token that was chosen. Raises BadRequest where nothing can follow it."""
        if not self._matcher.consume_token(token):
            raise _no_way_on()
        self._never_next = None


def hold(logits: torch.Tensor, cursors: Sequence[Cursor | None]) -> tuple[torch.Tensor, dict[int, BadRequest]]:
    """`logits` [n, num_tokens] with minus infinity for what a row's grammar does not allow; a copy where there is one.

    Errors by row, for those that cannot go on.
    """
    errors: dict[int, BadRequest] = {}
    if all(cursor is None for cursor in cursors):
        return logits, errors
    on_host = logits.device.type == "cpu"
    # On the host numpy masks a row in 0.1 ms; torch's threads take as long as that to begin, and far longer when the
    # cores are busy.
    held = torch.from_numpy(logits.numpy().copy()) if on_host else logits.clone()
    for row, cursor in enumerate(cursors):
        if cursor is None:
            continue
        try:
            forbidden = ~cursor.allowed()
        except BadRequest as error:
            errors[row] = error
        else:
            if on_host:
                np.putmask(held[row].numpy(), forbidden, -np.inf)
            else:
                held[row].masked_fill_(torch.from_numpy(forbidden).to(held.device), -torch.inf)
    return held, errors


class _WordPieces:
    """What llguidance asks of a tokenizer that it does not know: each token's bytes.

    A piece that continues no word comes with the space that decoding puts before it; the first one of an answer loses
    it, which is why grammars here begin with an optional space. A piece that continues one cannot be the first: its
    prefix would stay in the text.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, prefix: str) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.continues = np.array([number for number, piece in enumerate(pieces) if piece.startswith(prefix)])
        self.tokens = [(piece[len(prefix) :] if piece.startswith(prefix) else f" {piece}").encode() for piece in pieces]
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = tokenizer.all_special_ids

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("nothing is tokenized where nothing is forced")


def _no_way_on() -> BadRequest:
    return BadRequest(
        "the answer cannot be held to its grammar any further: no token of this model continues it; a tokenizer of "
        "whole words cannot write every text. Ask for another form"
    )


def _reason(matcher: Any) -> str:
    """The library's own words, without the parser's state, which follows in lines of its own."""
    return str(matcher.get_error()).strip().partition("\n")[0][:_MOST_REASON]
