"""Answers constrained by a grammar. llguidance, an optional dependency, computes the allowed next tokens.

A grammar is text in llguidance's Lark dialect. Masks are computed during generation, so compiling takes milliseconds;
the limits below bound the cost of a malicious grammar.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from vlora.errors import BadRequest
from vlora.models.pretrained import from_pretrained
from vlora.threads import background_executor

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms for a mask
    "step_max_items": 50_000,  # about 3 ms for a mask
    "max_lexer_states": 20_000,  # 1 to 2 KiB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_STACK_BYTES = 1 << 28  # four times what a chain in MAX_GRAMMAR_CHARS takes; reserved, not used
_STACK_SIZE = threading.Lock()  # the process has one for new threads
_MOST_REASON = 300  # characters
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars for one model's tokens. The first grammar loads the tokenizer. Not thread-safe."""

    def __init__(self, model: str, num_tokens: int, eos_ids: Iterable[int]) -> None:
        """Store the settings; the tokenizer is not loaded yet."""
        self._model = model
        self._num_tokens = num_tokens
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: Any = None
        self._preamble = ""
        self._never_first: np.ndarray | None = None

    def compile(self, grammar: str) -> Grammar:
        """Compile a grammar. Raises BadRequest, with the reason, if it is invalid or not supported."""
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise BadRequest(
                "this server does not support grammars: llguidance is not installed (pip install 'vlora[grammar]')"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        # The library calls itself for each rule and $ref in a row, and a stack overflow ends the process.
        with background_executor("vlora-grammar") as deep, _STACK_SIZE:
            stack_bytes = threading.stack_size(_STACK_BYTES)
            try:
                compiling = deep.submit(
                    LLMatcher, self._tokenizer, self._preamble + grammar, log_level=0, limits=LLParserLimits(**_LIMITS)
                )
            finally:
                threading.stack_size(stack_bytes)
        matcher = compiling.result()
        if matcher.is_error():
            raise BadRequest(f"the grammar cannot be used: {_reason(matcher)}")
        return Grammar(matcher, self._num_tokens, self._never_first)

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        try:
            tokenizer = from_pretrained(AutoTokenizer, self._model)
            backend: Any = tokenizer.backend_tokenizer
            if type(backend.decoder).__name__ == "WordPiece":
                # Where only one text can follow, the library forces the tokens that the tokenizer gives for this text
                # alone. For WordPiece they decode to another text.
                self._preamble = _UNFORCED
                pieces: Any = _WordPieces(tokenizer, backend.decoder.prefix)
                self._never_first = pieces.continues
                return LLTokenizer(pieces, eos_token=self._eos_ids)
            return LLTokenizer(backend.to_str(), eos_token=self._eos_ids)
        except (OSError, ValueError, AttributeError) as error:
            raise BadRequest(f"this model does not support grammars: {error}") from error


@dataclasses.dataclass(eq=False)
class Grammar:
    """A compiled grammar for any number of answers. never_first: tokens that cannot be the first of an answer."""

    matcher: Any
    num_tokens: int
    never_first: np.ndarray | None = None

    def begin(self) -> Cursor:
        return Cursor(self.matcher.deep_copy(), self.num_tokens, self.never_first)


@dataclasses.dataclass(eq=False)
class Cursor:
    """The place of one answer in a grammar. never_next: tokens that cannot be its next one."""

    matcher: Any
    num_tokens: int
    never_next: np.ndarray | None = None

    def allowed(self) -> np.ndarray:
        """The allowed next tokens, bool [num_tokens], including end-of-sequence tokens if the answer may end.

        Raises:
            BadRequest: No token is allowed, or computing the mask exceeds a limit.
        """
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self.matcher.is_error():
            if _reason(self.matcher).startswith("NoExtension"):
                raise _no_way_on()
            raise BadRequest(f"the answer cannot continue within its grammar: {_reason(self.matcher)}")
        allowed = np.zeros(self.num_tokens, dtype=bool)
        known = min(len(bits), self.num_tokens)
        allowed[:known] = bits[:known]
        if self.never_next is not None:
            allowed[self.never_next] = False
        if not allowed.any():
            raise _no_way_on()
        return allowed

    def advance(self, token: int) -> None:
        """Advance by the sampled token. Raises BadRequest if the grammar does not accept it."""
        if not self.matcher.consume_token(token):
            raise _no_way_on()
        self.never_next = None


def hold(logits: torch.Tensor, cursors: Sequence[Cursor | None]) -> tuple[torch.Tensor, dict[int, BadRequest]]:
    """Mask the tokens that a row's grammar does not allow with minus infinity.

    Args:
        logits: [n, num_tokens]; not changed.
        cursors: One per row; None for a row without a grammar.

    Returns:
        The masked logits (a copy if any row has a grammar), and errors by row for answers that cannot continue.
    """
    errors: dict[int, BadRequest] = {}
    if all(cursor is None for cursor in cursors):
        return logits, errors
    on_host = logits.device.type == "cpu"
    # On the host numpy masks a row in 0.1 ms; torch's threads need as long to start, and much longer if the cores are
    # busy.
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
    """The interface that llguidance requires of a custom tokenizer: each token's bytes.

    A piece that starts a word includes the space that decoding inserts before it. The first piece of an answer loses
    that space, so grammars begin with an optional space. A continuation piece cannot be the first token of an answer,
    because its prefix would stay in the text.
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
        raise NotImplementedError("text is tokenized only if tokens are forced, which is disabled")


def _no_way_on() -> BadRequest:
    return BadRequest(
        "the answer cannot continue within its grammar: no token of this model fits; a tokenizer of whole words cannot "
        "produce every text. Use another grammar or schema"
    )


def _reason(matcher: Any) -> str:
    """The first line of the library's message; the parser's state follows in later lines."""
    return str(matcher.get_error()).strip().partition("\n")[0][:_MOST_REASON]
