"""The heads and questions of a stream, which all answer about each frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Protocol

import msgspec

from vlora.client.values import Answer, FrameAnswer, HeadResult, StreamOptions, TextQuestion
from vlora.config import ServerConfig
from vlora.errors import BadRequest, DeadlineMissed
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.detokenizer import Piece
from vlora.server.images import RawImage
from vlora.server.prompts import Images, Level, SharedImages, TextRequest, as_prompt, check_text
from vlora.server.security.public_errors import to_vlora_error
from vlora.types import ErrorValue, SamplingParams


class FrameExecutor(Protocol):
    """The part of `FrontEnd` that a stream uses."""

    @property
    def engine_starting(self) -> bool:
        """Whether no engine is ready but one is starting. Frames wait until then; `StreamSession.resume` follows."""
        ...

    async def ask_head(self, images: Images, adapter: str, head: str, level: Level) -> HeadResult: ...

    def generate(self, asked: TextRequest) -> AsyncGenerator[tuple[int, Piece | Answer], None]: ...


async def images_per_frame(options: StreamOptions, adapters: AdapterCatalog, config: ServerConfig) -> int | None:
    """Check what a stream asks of each frame. Returns the number of images that its heads read; None without heads.

    Raises:
        UnknownAdapter, UnknownHead: There is no such adapter or head.
        BadRequest: Its heads read different numbers of images, a question is not accepted as a prompt, or there are
            more heads and questions than the server's limit of requests.
    """
    number = len(options.heads) + len(options.questions)
    if number > config.max_requests:
        limit = config.max_requests
        raise BadRequest(f"the stream has {number} heads and questions; the number must be from 1 to {limit}")
    num_images: dict[int, str] = {}
    for adapter, head in options.heads:
        summary = adapters.head_of(await adapters.resolve(adapter), head)
        num_images.setdefault(summary.num_frames, f"head {head!r} of adapter {adapter!r}")
    if len(num_images) > 1:
        reads = ", ".join(f"{owner} {count}" for count, owner in num_images.items())
        raise BadRequest(f"the stream's heads read different numbers of images per frame ({reads}); open a stream each")
    for question in options.questions:
        check_text(as_prompt(question.question), SamplingParams(max_tokens=question.max_tokens), config)
        if question.adapter is not None:
            await adapters.resolve(question.adapter)
    return next(iter(num_images), None)


class FrameQuestions:
    """Asks all heads and questions of one stream about a frame, concurrently, with its images processed once."""

    def __init__(self, executor: FrameExecutor, options: StreamOptions, tenant: str | None) -> None:
        """tenant: name of the stream owner's token."""
        self._executor = executor
        self._options = options
        self._level = Level(priority=options.priority, tenant=tenant)

    async def answers(self, images: Sequence[bytes | RawImage], within_s: float | None) -> tuple[FrameAnswer, ...]:
        """The answer or the error of each head, then of each question. within_s: bound on each answer."""
        shared = SharedImages(images)
        return tuple(
            await asyncio.gather(
                *(
                    self._complete(FrameAnswer(adapter=adapter, head=head), self._head(shared, adapter, head, within_s))
                    for adapter, head in self._options.heads
                ),
                *(
                    self._complete(
                        FrameAnswer(adapter=question.adapter, question=question.question),
                        self._text(shared, question, within_s),
                    )
                    for question in self._options.questions
                ),
            )
        )

    async def _complete(self, asked: FrameAnswer, answering: Awaitable[HeadResult | Answer]) -> FrameAnswer:
        bound = self._options.max_latency_s
        try:
            result = await answering
        except Exception as error:
            if isinstance(error, TimeoutError) and bound is not None:
                error = DeadlineMissed(f"the frame was not answered within the stream's {bound:g} s")
            return msgspec.structs.replace(asked, error=ErrorValue.of(to_vlora_error(error)))
        return msgspec.structs.replace(asked, **{"text" if asked.head is None else "answer": result})

    async def _head(self, images: SharedImages, adapter: str, head: str, within_s: float | None) -> HeadResult:
        async with asyncio.timeout(within_s):
            return await self._executor.ask_head(images, adapter, head, self._level._replace(max_latency_s=within_s))

    async def _text(self, images: SharedImages, question: TextQuestion, within_s: float | None) -> Answer:
        asked = TextRequest(
            question.question,
            images,
            adapter=question.adapter,
            sampling=SamplingParams(max_tokens=question.max_tokens),
            level=self._level._replace(max_latency_s=within_s),
            whole=True,
        )
        async with asyncio.timeout(within_s), contextlib.aclosing(self._executor.generate(asked)) as parts:
            *_, (_, answer) = [part async for part in parts]
        assert isinstance(answer, Answer)
        return answer
