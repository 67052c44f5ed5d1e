"""Learning in the server: the answers that are kept, as trainings have them, and the engine as evaluations use it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image as Pillow

from vlora.client.values import Answer
from vlora.config import ServerConfig
from vlora.engine.interface import EngineInterface
from vlora.engine.operations import Train
from vlora.errors import BadRequest, UnknownAdapter
from vlora.learning.learning import Learning
from vlora.learning.sample_store import AnsweredRequest
from vlora.operations import ListTrainings
from vlora.server.active_requests import RequestClock
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.detokenizer import AnswerText
from vlora.server.images import RawImage
from vlora.server.prompts import Conversation, Images, Prompt, PromptEncoder, SharedImages, visuals_of
from vlora.types import MAX_PRIORITY, Request, SamplingParams, TrainingStatus
from vlora.types.video import Video, VideoFile

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor


class KeptQuestion(NamedTuple):
    """A question with an answer to keep. version: of its adapter, when it was asked."""

    adapter: str
    version: str
    question: str


class Collector:
    """Keeps answers to single questions with at most one image. Used from one event loop."""

    def __init__(self, learning: Learning) -> None:
        self._learning = learning

    def question_of(self, prompt: Prompt, images: Images, adapter: str | None) -> KeptQuestion | None:
        """The question to keep of a prompt; None if its adapter does not learn, or if no training has such prompts."""
        version = self._learning.version_of(adapter)
        shown = visuals_of(images)
        refused = len(shown) > 1 or any(isinstance(one, Video | VideoFile) for one in shown)
        question = None if version is None or refused else _question(prompt)
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
        visuals: Sequence[Any] = visuals_of(images)
        image = visuals[0] if visuals else None
        repeatable = answer.finish_reason == "stop" and _is_plain(sampling)
        answered = AnsweredRequest(
            answer.request_id, tenant, kept.version, kept.question, answer.text, None, repeatable
        )
        num_bytes = len(image.pixels if isinstance(image, RawImage) else image or b"")
        self._learning.keep(kept.adapter, answered, num_bytes, lambda: _encoded(image))


def _question(prompt: Prompt) -> str | None:
    """The text of a prompt that has the form of a training's questions: image, then text."""
    if not isinstance(prompt, Conversation) or prompt.tools or len(prompt.messages) != 1:
        return None
    message: Mapping[str, Any] = prompt.messages[0]
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


@dataclasses.dataclass(eq=False)
class EngineModel:
    """Of parts of the front end."""

    _engine: EngineInterface
    _adapters: AdapterCatalog
    _encoder: PromptEncoder
    _processor: InputProcessor
    _config: ServerConfig

    async def answer(self, question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        clock = RequestClock(self._config.request_timeout_s)
        encoded = await self._encoder.encode(question, () if image is None else [image], clock)
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_ids=encoded.prompt_ids,
            vision=encoded.vision,
            adapter=adapter,
            adapter_version=version,
            sampling=SamplingParams(max_tokens=len(label.encode()) + 1),  # a token has a byte at least
            priority=-MAX_PRIORITY,
            whole=True,
        )
        text = AnswerText(self._processor.decode, self._processor.token_text, (), 0)
        with clock.bound():
            async for output in self._engine.generate(request, clock.deadline):
                text.feed(output.token_ids, output.scores)
                if output.error is not None:
                    raise output.error.to_exception()
        text.finish()
        return text.text

    def check_label(self, label: str) -> None:
        for token in self._processor.special_tokens:
            if token in label:
                raise BadRequest(
                    f"the label has the model's special token {token!r}; send the text of the answer", field="label"
                )

    async def load(self, name: str, folder: Path) -> str:
        """See `ServedModel`. A pinned adapter is pinned again."""
        if name not in self._adapters.learning:
            self._adapters.hidden.add(name)
        is_pinned = False
        with contextlib.suppress(UnknownAdapter):
            is_pinned = (await self._adapters.current(name)).pinned
        if not is_pinned:
            return (await self._adapters.replace(name, str(folder))).version
        await self._engine.pin_adapter(name, False)
        try:
            return (await self._adapters.replace(name, str(folder))).version
        finally:  # the version before, if the other one cannot be loaded
            with contextlib.suppress(UnknownAdapter):  # it was unloaded meanwhile
                await self._engine.pin_adapter(name, True)

    async def check(self, name: str) -> None:
        if (status := await self._adapters.current(name)).heads:
            heads = ", ".join(head.name for head in status.heads)
            raise BadRequest(
                f"adapter {name!r} has task heads ({heads}), which later versions would lack; it cannot learn"
            )

    async def unload(self, name: str) -> None:
        with contextlib.suppress(UnknownAdapter):
            await self._engine.unload_adapter(name)
        self._adapters.invalidate()

    async def train(self, plan: Path) -> None:
        """See `ServedModel`. A training that was cancelled or has failed remains so."""
        await self._engine.call(Train(str(plan), reopen=False))

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        return await self._engine.call(ListTrainings())
