"""The answers that learning adapters keep: those to single questions with at most one image, as trainings have them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image as Pillow

from vlora.client.values import Answer
from vlora.learning.learning import Learning
from vlora.learning.sample_store import AnsweredRequest
from vlora.server.media.image_decoding import RawImage
from vlora.server.prompt_encoder import SharedImages
from vlora.server.prompts import Conversation, PlainText, Prompt, PromptTokens
from vlora.types import SamplingParams


class KeptQuestion(NamedTuple):
    """A question with an answer to keep. version: of its adapter, when it was asked."""

    adapter: str
    version: str
    question: str


class Collector:
    """Used from one event loop."""

    def __init__(self, learning: Learning) -> None:
        self._learning = learning

    def question_of(self, prompt: Prompt, num_images: int, adapter: str | None) -> KeptQuestion | None:
        """The question to keep of a prompt; None if its adapter does not learn, or if no training has such prompts."""
        version = self._learning.version_of(adapter)
        question = None if version is None or num_images > 1 else _question(prompt)
        if version is None or question is None or not question.strip():
            return None
        assert adapter is not None
        return KeptQuestion(adapter, version, question)

    def keep(
        self,
        kept: KeptQuestion,
        images: SharedImages | Sequence[Any],
        answer: Answer,
        tenant: str | None,
        sampling: SamplingParams,
    ) -> None:
        """Keep an answer. images: read from their sources."""
        visuals: Sequence[Any] = images.images if isinstance(images, SharedImages) else images
        image = visuals[0] if visuals else None
        if not isinstance(image, bytes | RawImage | None):
            return  # a video
        repeatable = answer.finish_reason == "stop" and _is_plain(sampling)
        answered = AnsweredRequest(
            answer.request_id, tenant, kept.version, kept.question, answer.text, None, repeatable
        )
        num_bytes = len(image.pixels if isinstance(image, RawImage) else image or b"")
        self._learning.keep(kept.adapter, answered, num_bytes, lambda: _encoded(image))


def _question(prompt: Prompt) -> str | None:
    """The text of a prompt that has the form of a training's questions: image, then text."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Conversation | PlainText | PromptTokens) or len(prompt) != 1:
        return None
    message: Mapping[str, Any] = prompt[0]
    content = message["content"]
    if message["role"] != "user" or isinstance(content, str):
        return content if message["role"] == "user" else None
    kinds = [part["type"] for part in content]
    if kinds not in (["text"], ["image", "text"]):
        return None
    text: str = content[-1]["text"]
    return text


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether these parameters give the answers of evaluations, as far as those are not cut off."""
    return sampling == SamplingParams(max_tokens=sampling.max_tokens, seed=sampling.seed, logprobs=sampling.logprobs)


def _encoded(image: bytes | RawImage | None) -> bytes | None:
    if not isinstance(image, RawImage):
        return image
    stream = io.BytesIO()
    Pillow.frombuffer("RGB", (image.width, image.height), image.pixels, "raw", "RGB", 0, 1).save(stream, "PNG")
    return stream.getvalue()
