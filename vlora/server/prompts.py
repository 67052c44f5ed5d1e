"""Prompts as clients send them: their forms, their limits, and an adapter's own question for images without text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from vlora.config import ServerConfig
from vlora.errors import BadRequest, TooLarge, listed
from vlora.server.detokenizer import MAX_STOP_CHARS, MAX_STOP_STRINGS
from vlora.server.media.image_decoding import RawImage
from vlora.types import SamplingParams
from vlora.types.video import Video

# A prompt of this size is ready in under 0.5 ms; a round trip to a thread takes as long on a busy core.
_SHORT_CHARS = 1000
_SHORT_TURNS = 4

Messages = Sequence[Mapping[str, Any]]
"""A conversation for a chat template; content entries are {"type": "image"}, {"type": "video"} or
{"type": "text", "text": ...}."""


class PlainText(NamedTuple):
    """A raw text prompt: no chat template, no images."""

    text: str


class PromptTokens(NamedTuple):
    """A prompt as token ids of the model's tokenizer."""

    token_ids: tuple[int, ...]


class Conversation(NamedTuple):
    """Messages for a chat template that takes tools (`FrontEnd.takes_tools`). tools: in the form of OpenAI's API."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]]


Prompt = str | Messages | PlainText | PromptTokens | Conversation
"""A question (images and videos are placed before it), a conversation, or a raw prompt."""

Image = bytes | RawImage | str
"""An encoded image, raw pixels, or the URL of an encoded one."""

Visual = Image | Video[Image]
"""An image of a prompt, or a video of such images."""


def check_text(prompt: Prompt, sampling: SamplingParams, config: ServerConfig) -> None:
    """Check the prompt's text and the stop strings.

    Raises:
        BadRequest: A text has an unpaired surrogate, or there are too many or too long stop strings.
        TooLarge: The prompt has more characters than the server accepts.
    """
    texts = list(_texts(prompt))
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"prompt contains an unpaired surrogate at index {error.start} (text begins with {text[:20]!r})",
                field="prompt",
            ) from error
    length = sum(len(text) for text in texts)
    if length > config.max_prompt_chars:
        raise TooLarge(
            f"the prompt has {length} characters; this server takes at most {config.max_prompt_chars}", field="prompt"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop has {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop")
    longest = max(map(len, sampling.stop), default=0)
    if longest > MAX_STOP_CHARS:
        raise BadRequest(f"a stop string has {longest} characters; at most {MAX_STOP_CHARS} are allowed", field="stop")


def is_empty(prompt: Prompt) -> bool:
    """Whether the prompt has no content. A plain text of blanks counts as content."""
    if isinstance(prompt, PlainText | PromptTokens):
        return not any(prompt)
    return not any(text.strip() for text in _texts(prompt))


def has_question(prompt: Prompt) -> bool:
    """Whether the prompt contains a question. Tools and a system message are not a question."""
    match prompt:
        case str() | PlainText() | PromptTokens():
            return not is_empty(prompt)
        case Conversation():
            return has_question(prompt.messages)
    return not is_empty([message for message in prompt if message["role"] != "system"])


def with_question(prompt: Prompt, question: str) -> Prompt:
    """A prompt of images only, completed with an adapter's question."""
    match prompt:
        case str():
            return question
        case Conversation():
            return prompt._replace(messages=cast(Messages, with_question(prompt.messages, question)))
        case PlainText() | PromptTokens():
            return prompt
    *before, last = prompt
    content = [] if isinstance(last["content"], str) else list(last["content"])
    return [*before, {**last, "content": [*content, {"type": "text", "text": question}]}]


def text_of_question(prompt: Prompt) -> str | None:
    """The text of a prompt that is a single question, possibly empty; None for other prompts."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Conversation | PlainText | PromptTokens) or len(prompt) != 1 or prompt[0]["role"] != "user":
        return None
    return " ".join(_texts(prompt))


def missing_question(adapter: str | None, questions: Collection[str]) -> BadRequest:
    """The error for images without text."""
    if adapter is None:
        why = "the base model has no default question"
    elif not questions:
        why = f"adapter {adapter!r} has no default question"
    else:
        why = f"adapter {adapter!r} has several questions: {listed(sorted(questions))}"
    return BadRequest(f"the prompt has images but no text, and {why}; send a question with the images", field="prompt")


def is_short(prompt: Prompt) -> bool:
    """Whether the hand-over to a thread costs more than tokenizing on the event loop (prompts without images)."""
    if isinstance(prompt, Conversation):
        return False
    num_turns = 1 if isinstance(prompt, str | PlainText | PromptTokens) else len(prompt)
    return num_turns <= _SHORT_TURNS and sum(map(len, _texts(prompt))) <= _SHORT_CHARS


def _texts(prompt: Prompt) -> Iterator[str]:
    match prompt:
        case PromptTokens():
            return
        case PlainText():
            yield prompt.text
            return
        case str():
            yield prompt
            return
        case Conversation():
            yield from _texts(prompt.messages)
            yield from map(json.dumps, prompt.tools)
            return
    for message in prompt:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")
