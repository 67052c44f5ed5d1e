"""The supported part of OpenAI's chat completion request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Request
from pydantic import Field, ValidationInfo, field_validator, model_validator

from vlora.errors import BadRequest, TooLarge
from vlora.server.batches.store import path_of
from vlora.server.http.sampling_fields import MAX_TOKENS, SamplingFields, StrictModel
from vlora.server.http.tools import MAX_TOOLS, Choice, NamedTool, Tool, ToolCall, call_grammar, json_grammar
from vlora.server.images import EncodedVideo
from vlora.server.security.access import caller_of
from vlora.types import MAX_LOGPROBS, SamplingParams
from vlora.types.domain import Way
from vlora.types.request import MAX_VISUALS
from vlora.types.video import Video, VideoFile

MAX_MESSAGES = 1024
MAX_PARTS = 256  # of one message
MAX_FRAMES = 256  # of one video


class ImageUrl(StrictModel):
    """A data URL, or an http, https or file URL that the operator allows."""

    url: str
    detail: str | None = None


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(StrictModel):
    """A video as its frames, URLs as of images. Either times, in seconds, one per frame, or fps."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)
    times: list[float] = Field([], max_length=MAX_FRAMES, fail_fast=True)
    fps: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def check_times(self) -> Self:
        if bool(self.times) == (self.fps is not None):
            raise ValueError("a video needs the times of its frames in seconds, or their fps; send one of the two")
        return self

    def as_value(self) -> Video[str]:
        times = self.times or [place / self.fps for place in range(len(self.video)) if self.fps]
        return Video(tuple(self.video), tuple(times))


class VideoUrl(StrictModel):
    """A data URL, an http, https or file URL that the operator allows, or file_id, a file of /v1/files. fps: frames per
    second; num_frames: as many at equal distances. By default one per second, at most 16 at equal distances."""

    url: str | None = None
    file_id: str | None = None
    fps: float | None = None
    num_frames: int | None = None

    def as_value(self, request: Request) -> EncodedVideo:
        """Raises BadRequest."""
        if (self.url is None) == (self.file_id is None):
            raise BadRequest("a video needs url or file_id; send one of the two", field="video_url")
        stored = self.file_id and path_of(request.app.state.files, self.file_id, caller_of(request))
        return VideoFile(stored or self.url or "", self.fps, self.num_frames)


class VideoUrlPart(StrictModel):
    type: Literal["video_url"]
    video_url: VideoUrl


class ChatMessage(StrictModel):
    """An assistant message may have tool calls in place of content; a tool message holds a call's result. name labels
    the speaker; clients copy empty annotations from answers."""

    WITHOUT_EFFECT: ClassVar = {"annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | ImagePart | VideoPart | VideoUrlPart, Field(discriminator="type")]],
            Field(max_length=MAX_PARTS, fail_fast=True),
        ]
    ) = ""
    tool_calls: list[ToolCall] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str = ""
    name: str | None = None

    @model_validator(mode="after")
    def check_role(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("a message has no content; send a text, or a list of parts")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of role {self.role!r}; only an assistant message can have calls")
        return self


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingFields):
    """The supported part of OpenAI's chat completion request. answer: whether the domain's head or words answer, not
    part of OpenAI's API; by default the way that was more accurate on validation data."""

    WITHOUT_EFFECT: ClassVar = {"functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],)}

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    answer: Way | None = None

    @field_validator("top_logprobs")
    @classmethod
    def check_logprobs(cls, top_logprobs: int | None, fields: ValidationInfo) -> int | None:
        if top_logprobs and not fields.data.get("logprobs"):
            raise ValueError("requires logprobs; set logprobs to true")
        return top_logprobs

    def sampling(self) -> SamplingParams:
        """Raises BadRequest when a value is out of range or fields cannot be combined."""
        form = self.response_format
        grammar = None if form is None else json_grammar(form.type, form.json_schema)
        if self.offered:
            if grammar is not None:
                raise BadRequest(
                    "response_format and tools cannot be combined: each sets the answer's format; leave one out, or "
                    "set tool_choice to 'none'",
                    field="response_format",
                )
            grammar = call_grammar(self.offered, self.tool_choice or "auto", self.parallel_tool_calls)
        elif isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required":
            raise BadRequest("tool_choice requires a call, but there are no tools; send tools", field="tool_choice")
        named = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return self.sampling_of(
            getattr(self, named),
            name=named,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar,
        )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools


ByUrl = str | Video[str] | EncodedVideo


def conversation_of(messages: Sequence[ChatMessage], request: Request) -> tuple[list[dict[str, Any]], list[ByUrl]]:
    """Messages for chat templates, and the URLs of images, of videos and of their frames in order.

    Raises:
        BadRequest: A tool call or a video is invalid.
        TooLarge: There are more images and videos than any server takes.
        UnknownFile: The caller has no such file.
    """
    images: list[ByUrl] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        text = message.content
        content: list[dict[str, str]] = []
        for part in [TextPart(type="text", text=text)] if isinstance(text, str) else text:
            if len(images) > MAX_VISUALS:  # the server's own limit is checked later
                raise TooLarge(f"the request has over {MAX_VISUALS} images and videos; send fewer")
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            elif isinstance(part, VideoPart | VideoUrlPart):
                video = part.as_value() if isinstance(part, VideoPart) else part.video_url.as_value(request)
                images.append(video)
                content.append({"type": "video"})
            else:
                images.append(part.image_url.url)
                content.append({"type": "image"})
        # Chat templates use the older name of the developer role.
        turn: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content if message.content else [],
        }
        if message.tool_calls:
            turn["tool_calls"] = [call.as_value() for call in message.tool_calls]
        plain.append(turn)
    return plain, images
