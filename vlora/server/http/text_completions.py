"""OpenAI's text completions: raw prompts without the chat template, their request and responses."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from vlora.client.values import Answer, TokenLogprob
from vlora.errors import BadRequest
from vlora.server.detokenizer import Piece
from vlora.server.http.chat_response import EventBuilder, finite, usage
from vlora.server.http.sampling_fields import SamplingFields
from vlora.server.prompts import PlainText, PromptTokens
from vlora.types import MAX_LOGPROBS, SamplingParams
from vlora.types.request import MAX_INPUTS

MAX_PROMPTS = 64
_MOST = {"prompt": MAX_PROMPTS, "input": MAX_INPUTS}  # by field
DEFAULT_TOKENS = 16  # as in OpenAI's API


def _read_prompts(value: Any, info: ValidationInfo) -> list[PlainText | PromptTokens]:
    """Parse the prompt. Raises BadRequest when it is neither texts nor token ids."""
    field = info.field_name or "prompt"
    prompts = value if isinstance(value, list) else [value]
    if prompts and prompts is value and all(_is_token(each) for each in prompts):
        return [PromptTokens(tuple(prompts))]
    if not 0 < len(prompts) <= _MOST[field]:
        raise BadRequest(f"{field} has {len(prompts)} entries; send 1 to {_MOST[field]}", field=field)
    found: list[PlainText | PromptTokens] = []
    for each in prompts:
        if isinstance(each, str):
            found.append(PlainText(each))
        elif isinstance(each, list) and each and all(map(_is_token, each)):
            found.append(PromptTokens(tuple(each)))
        else:
            raise BadRequest(
                f"{field} has {_describe(each)}; send a text, a list of texts, token ids, or a list of lists of token "
                "ids",
                field=field,
            )
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _describe(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."


_TOKENS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
        _TOKENS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKENS},
    ]
}
Prompts = Annotated[list[PlainText | PromptTokens], PlainValidator(_read_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(SamplingFields):
    """prompt: one or several texts, or token ids of the model's tokenizer. logprobs: log probabilities of each token
    and of this many top tokens. echo: the answer begins with the prompt's text."""

    WITHOUT_EFFECT: ClassVar = {"suffix": ("",), "best_of": (1,)}

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    def sampling(self) -> SamplingParams:
        """Raises BadRequest when a value is out of range."""
        if self.echo and any(isinstance(prompt, PromptTokens) for prompt in self.prompt):
            raise BadRequest("echo is supported for text prompts only; leave it out for token ids", field="echo")
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "echo and logprobs cannot be combined: log probabilities cover the answer's tokens only", field="echo"
            )
        limit = max(DEFAULT_TOKENS, self.min_tokens) if self.max_tokens is None else self.max_tokens
        return self.sampling_of(limit, logprobs=self.logprobs)

    def echoed(self) -> tuple[str, ...]:
        """The text at the beginning of each prompt's answers."""
        return tuple(prompt.text if self.echo and isinstance(prompt, PlainText) else "" for prompt in self.prompt)


class TextResponseBuilder(EventBuilder):
    """Builds the responses to one request. echoed: the text at the beginning of each prompt's answers."""

    def __init__(
        self, head: dict[str, Any], num_choices: int, echoed: Sequence[str], *, logprobs: bool, counts: bool
    ) -> None:
        super().__init__({**head, "object": "text_completion"}, num_choices, counts)
        self._echoed = echoed
        self._logprobs = logprobs
        self._offsets = [0] * (num_choices * len(echoed))
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._offsets]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._choice(index, self._echo(index) + answer.text, answer.logprobs, answer.finish_reason),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage(answers, self._num_choices)}

    def begin(self, index: int) -> bytes:
        """The event with a choice's echoed text; empty without echo."""
        echo = self._echo(index)
        return self._event(index, self._choice(index, echo, (), None)) if echo else b""

    def piece(self, index: int, piece: Piece) -> bytes:
        return self._event(index, self._choice(index, piece.text, piece.logprobs, None), piece)

    def end(self, index: int, answer: Answer) -> bytes:
        return self._event(index, self._choice(index, "", (), answer.finish_reason), answer)

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._num_choices]

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        scores = self._scores(index, tokens) if self._logprobs else None
        return {"text": text, "logprobs": scores, "finish_reason": finish_reason}

    def _scores(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            data, decoder = token.data or b"", self._decoders[index]
            # A token within a character starts where the character does, and one after half of a character behind it.
            behind = decoder.getstate()[0] and data and data[0] & 0xC0 != 0x80
            offsets.append(self._offsets[index] + bool(behind))
            self._offsets[index] += len(decoder.decode(data))
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [{text: finite(logprob) for text, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }
