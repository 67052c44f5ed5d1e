"""OpenAI's responses without state: their request, which is answered as a chat completion, and their answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vlora.client.values import Answer
from vlora.errors import BadRequest
from vlora.server.detokenizer import Piece
from vlora.server.http.chat_request import MAX_MESSAGES, MAX_PARTS, ChatRequest, VideoUrl
from vlora.server.http.chat_response import event, how, usage
from vlora.server.http.sampling_fields import MAX_TOKENS, RequestFields, StrictModel


class InputText(StrictModel):
    WITHOUT_EFFECT: ClassVar = {"annotations": ([],), "logprobs": ([],)}  # of an earlier answer, as it was sent

    type: Literal["input_text", "output_text"]
    text: str

    def as_part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class InputImage(StrictModel):
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None

    def as_part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


class InputVideo(StrictModel):
    """Not part of OpenAI's API. video_url: as in a chat completion."""

    type: Literal["input_video"]
    video_url: VideoUrl

    def as_part(self) -> dict[str, Any]:
        return {"type": "video_url", "video_url": self.video_url.model_dump()}


InputPart = Annotated[InputText | InputImage | InputVideo, Field(discriminator="type")]


class InputMessage(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: str | None = None  # of an earlier answer, as it was sent
    status: str | None = None

    def as_content(self) -> str | list[dict[str, Any]]:
        return self.content if isinstance(self.content, str) else [part.as_part() for part in self.content]


class TextConfig(StrictModel):
    """format: with `type` text, json_object, or json_schema and then `name`, `schema`, `strict` and `description`."""

    format: dict[str, Any] = Field(default={"type": "text"})


class ResponsesRequest(RequestFields):
    """The supported part of OpenAI's request for a response. Nothing is stored, so the whole conversation is sent."""

    WITHOUT_EFFECT: ClassVar = {"background": (False,), "include": ([],), "top_logprobs": (0,), "tools": ([],)} | {
        **{"parallel_tool_calls": (True, False), "tool_choice": ("auto", "none"), "truncation": ("disabled",)}
    }

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    text: TextConfig = TextConfig()

    def as_chat(self) -> ChatRequest:
        """Raises BadRequest for an unknown type of the format."""
        form = {**self.text.format}
        if (kind := form.pop("type", None)) not in ("text", "json_object", "json_schema"):
            raise BadRequest("text.format has no type 'text', 'json_object' or 'json_schema'", field="text.format.type")
        said = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if self.instructions is not None:
            said = [InputMessage(role="system", content=self.instructions), *said]
        return ChatRequest(
            **self.model_dump(include={*RequestFields.model_fields}, exclude_unset=True),
            messages=[{"role": each.role, "content": each.as_content()} for each in said],
            max_completion_tokens=self.max_output_tokens,
            response_format={"type": kind, "json_schema": form or None},
        )


class ResponsesBuilder:
    """Builds the responses to one request, as `ChatResponseBuilder` does. name: the end of its ids."""

    def __init__(self, name: str, created: int, body: ResponsesRequest) -> None:
        self._numbers = itertools.count()
        self._place = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
        given = {"model", "instructions", "max_output_tokens", "temperature", "top_p", "text"}
        self._response = {
            **{"id": f"resp_{name}", "object": "response", "created_at": created, **body.model_dump(include=given)},
            **{"status": "in_progress", "output": [], "error": None, "incomplete_details": None, "usage": None},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": False, "metadata": {}},
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        counts, cut = usage(answers), answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        details = {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
        return {
            **self._response,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(status, answer.text)],
            "usage": {
                **{"input_tokens": counts["prompt_tokens"], "input_tokens_details": details},
                **{"output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}},
                "total_tokens": counts["total_tokens"],
            },
            **how(answer),
        }

    def begin(self, _: int) -> bytes:
        opened = self._event("created", response=self._response) + self._event("in_progress", response=self._response)
        opened += self._event("output_item.added", output_index=0, item=self._message("in_progress"))
        return opened + self._event("content_part.added", **self._place, part=_part(""))

    def piece(self, _: int, piece: Piece) -> bytes:
        return self._event("output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def end(self, _: int, answer: Answer) -> bytes:
        response = self.whole([answer])
        closed = self._event("output_text.done", **self._place, text=answer.text, logprobs=[])
        closed += self._event("content_part.done", **self._place, part=_part(answer.text))
        closed += self._event("output_item.done", output_index=0, item=response["output"][0])
        return closed + self._event(response["status"], response=response)

    def usage(self, _: Sequence[Answer]) -> bytes:
        return b""  # the last event of the answer has the counts

    def _message(self, status: str, *texts: str) -> dict[str, Any]:
        fields = {"type": "message", "id": self._place["item_id"], "role": "assistant", "status": status}
        return {**fields, "content": list(map(_part, texts))}

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        return b"event: %b\n" % kind.encode() + event({"type": kind, "sequence_number": next(self._numbers), **fields})


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
