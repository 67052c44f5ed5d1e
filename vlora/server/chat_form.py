"""OpenAI's chat completions as they are served here: the request's fields, and the answer's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from vlora.client.values import Answer, TokenLogprob
from vlora.errors import BadRequest
from vlora.server.response_format import json_grammar
from vlora.server.text import MAX_STOP_STRINGS
from vlora.types import MAX_LOGPROBS, MAX_PRIORITY, SamplingParams

MAX_CHOICES = 16
MAX_MESSAGES = 1024
MAX_PARTS = 256  # of one message
_MOST_TOKENS = 2**31 - 1  # whatever a model could take
_LEAST_LOGPROB = -9999.0  # as in OpenAI's answers: JSON has no infinity

_LABELS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that name or file a request and never change its answer: taken, and not used."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
"""Fields that are not served, with the values that ask for nothing."""


class Strict(BaseModel):
    """A form whose unknown fields are refused: one that was ignored would change the answer. null is a field's default.

    Only the first unknown field is named: a body may hold a million of them.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {name: value for name, value in fields.items() if not cls.asks_for_nothing(name, value)}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        return {name: value for name, value in kept.items() if name in cls.model_fields or name == unknown}

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """Whether a field says what would hold without it."""
        return value is None


class ImageUrl(Strict):
    """A data URL; an http, https or file URL where the operator allows it."""

    url: str
    detail: str | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
            Field(max_length=MAX_PARTS, fail_fast=True),
        ]
    )

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """A name only labels who speaks; the rest are an answer's fields, as clients send them back."""
        return value is None or name == "name" or (name in ("tool_calls", "annotations") and value == [])


class StreamOptions(Strict):
    include_usage: bool = False

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        return value is None or (name == "include_obfuscation" and value is False)


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Leveled(Strict):
    """A request's service level: none of OpenAI's fields.

    max_latency_s: an answer after that many seconds is no answer. priority: who waits with a higher one comes first.
    """

    max_latency_s: float | None = Field(None, gt=0)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class ChatRequest(Leveled):
    """What is served of OpenAI's request. model: the base model's name, or an adapter's. max_ttft_s: bound on the first
    token, in seconds."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, le=_MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, le=_MOST_TOKENS)
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_ttft_s: float | None = Field(None, gt=0)

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        return value is None or name in _LABELS or value in _WITHOUT_EFFECT.get(name, ())

    @field_validator("top_logprobs")
    @classmethod
    def check_logprobs(cls, top_logprobs: int | None, fields: ValidationInfo) -> int | None:
        if top_logprobs is not None and not fields.data.get("logprobs"):
            raise ValueError("more of logprobs is asked for; set logprobs to true as well")
        return top_logprobs

    def sampling(self) -> SamplingParams:
        """Raises BadRequest when a value is out of range, or not served."""
        form = self.response_format
        limits = {
            "max_completion_tokens": self.max_completion_tokens,
            "max_tokens": self.max_tokens,
            "default": SamplingParams().max_tokens,
        }
        name, limit = next((name, given) for name, given in limits.items() if given is not None)
        if limit < 1:
            raise BadRequest(f"{name} is {limit}; it must be at least 1", field=name)
        return SamplingParams(
            max_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=None if form is None else json_grammar(form.type, form.json_schema),
        )

    def conversation(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages as chat templates take them, and the images' URLs in order."""
        images: list[str] = []
        plain: list[dict[str, Any]] = []
        for message in self.messages:
            text = message.content
            content: list[dict[str, str]] = []
            for part in [TextPart(type="text", text=text)] if isinstance(text, str) else text:
                if isinstance(part, TextPart):
                    content.append({"type": "text", "text": part.text})
                else:
                    images.append(part.image_url.url)
                    content.append({"type": "image"})
            # Templates know the older name.
            plain.append({"role": "system" if message.role == "developer" else message.role, "content": content})
        return plain, images


class Completion:
    """The forms one request's answer takes; its id, time and model's name are in each."""

    def __init__(self, head: dict[str, Any], *, logprobs: bool) -> None:
        self._head = head
        self._logprobs = logprobs

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
                "logprobs": self._scores(answer.logprobs),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(answers)}

    def piece(
        self,
        index: int,
        delta: dict[str, str],
        *,
        tokens: Sequence[TokenLogprob] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        """One server-sent event with a choice's next text, or its end."""
        scores = None if tokens is None else self._scores(tokens)
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": scores}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def usage(self, answers: Sequence[Answer]) -> bytes:
        """The event that ends a stream whose usage was asked for."""
        return event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(answers)})

    def _scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {**_score(token.token, token.logprob), "top_logprobs": [_score(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """The prompt counts once, whatever the number of choices; cached_tokens is what the first of them had not to
    compute."""
    prompt = answers[0].num_prompt_tokens
    completion = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].timings.num_cached_tokens},
    }


def _score(token: str, logprob: float) -> dict[str, Any]:
    # A part of a character has no bytes that could be told from its text.
    data = None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": data}
