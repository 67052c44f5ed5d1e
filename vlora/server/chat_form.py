"""OpenAI's request for chat completions as it is served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from vlora.server.request_form import MAX_TOKENS, Sampled, Strict
from vlora.server.response_format import json_grammar
from vlora.types import MAX_LOGPROBS, SamplingParams

MAX_MESSAGES = 1024
MAX_PARTS = 256  # of one message


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


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(Sampled):
    """What is served of OpenAI's request for chat completions."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    @field_validator("top_logprobs")
    @classmethod
    def check_logprobs(cls, top_logprobs: int | None, fields: ValidationInfo) -> int | None:
        if top_logprobs is not None and not fields.data.get("logprobs"):
            raise ValueError("more of logprobs is asked for; set logprobs to true as well")
        return top_logprobs

    def sampling(self) -> SamplingParams:
        """Raises BadRequest when a value is out of range, or not served."""
        form = self.response_format
        named = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return self.sampling_of(
            getattr(self, named),
            name=named,
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
