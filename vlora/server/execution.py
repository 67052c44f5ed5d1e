"""The execution of prepared requests by the engine: text as it is decoded, the results of heads, and embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from vlora.client.values import Answer, HeadResult, TokenLogprob
from vlora.engine.interface import EngineInterface
from vlora.errors import BadRequest, DeadlineUnreachable, OverCapacity, PromptTooLong
from vlora.models.vision.images import Region
from vlora.server.active_requests import RequestClock
from vlora.server.detokenizer import AnswerText, Piece
from vlora.server.metrics import Metrics
from vlora.server.prompts import Images, Level, PromptEncoder
from vlora.server.security.limits import Quotas
from vlora.server.security.public_errors import named
from vlora.types import FoundBox, HeadAnswer, HeadSummary, Request, RequestOutput, Timings
from vlora.types.domain import DomainSummary

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor

T = TypeVar("T")

_REFUSED = {each.code for each in (PromptTooLong, OverCapacity, DeadlineUnreachable)}
"""Errors before anything is computed, which cost no quota."""


@dataclasses.dataclass(eq=False)
class Execution:
    """One per front end, used from its event loop."""

    engine: EngineInterface
    processor: InputProcessor
    encoder: PromptEncoder
    metrics: Metrics
    quotas: Quotas

    async def head(
        self,
        images: Images,
        adapter: str,
        head: HeadSummary,
        clock: RequestClock,
        request_id: str,
        level: Level,
    ) -> HeadResult:
        """Run one pass through a head, with the question it was trained on. Raises the request's error."""
        if len(images) != head.num_frames:
            raise BadRequest(
                f"head {head.name!r} of adapter {adapter!r} reads {head.num_frames} "
                f"image{'s' * (head.num_frames != 1)} per request; got {len(images)}"
            )
        encoded = await self.encoder.encode(head.prompt, images, clock)
        request = Request(
            request_id=request_id,
            prompt_ids=encoded.prompt_ids,
            vision=encoded.vision,
            adapter=adapter,
            head=head.name,
            **level._asdict(),
        )
        answer, timings = await self.in_one_pass(request, clock)
        return HeadResult(
            **msgspec.structs.asdict(in_pixels(answer, encoded.shown)),
            adapter=adapter,
            head=head.name,
            timings=timings,
            total_s=clock.elapsed_s,
        )

    async def in_one_pass(self, request: Request, clock: RequestClock) -> tuple[HeadAnswer, Timings]:
        """The answer of a head, or an embedding. Raises the request's error."""
        async with contextlib.aclosing(self._outputs(request, clock)) as outputs:
            *_, output = [output async for output in outputs]
        if output.error is not None:
            raise named(output.error, request.adapter)
        assert output.head is not None and output.timings is not None, "a request in one pass ends with its answer"
        total_s, queue_s = clock.elapsed_s, output.timings.queue_s
        self.metrics.answered(request, total_s=total_s, first_s=total_s, queue_s=queue_s, num_completion=0)
        return output.head, output.timings

    async def words(
        self, request: Request, clock: RequestClock, domain: DomainSummary | None = None, logprobs: bool = True
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Yield one request's pieces, then its Answer. Raises the request's error.

        Args:
            domain: That the request asks about.
            logprobs: Whether the caller reads log probabilities; without, they only give the answer's confidence.
        """
        sampling = request.sampling
        own = self.processor
        text = AnswerText(own.decode, own.token_text, sampling.stop, sampling.min_tokens, own.token_bytes)
        submitted_s, first_s = clock.elapsed_s, 0.0

        def counted(piece: Piece) -> Piece:
            scores = piece.logprobs if logprobs else ()
            return Piece(piece.text, scores, len(request.prompt_ids), text.num_tokens)

        async with contextlib.aclosing(self._outputs(request, clock)) as outputs:
            async for output in outputs:
                if output.token_ids and not text.num_tokens:
                    first_s = clock.elapsed_s
                if not text.stopped:  # drop tokens that arrive before the engine cancels
                    piece = text.feed(output.token_ids, output.scores)
                    if piece.text:
                        yield counted(piece)
                    if text.stopped and not output.finished:
                        await self.engine.cancel(request.request_id)
        if output.error is not None and (output.timings is None or not text.stopped):
            raise named(output.error, request.adapter)
        piece = text.finish()
        if piece.text:
            yield counted(piece)
        assert output.timings is not None, "an answered request has timings"
        if request.whole and output.timings.ttft_s is not None:
            first_s = submitted_s + output.timings.ttft_s
        answer = Answer(
            text=text.text,
            finish_reason="length" if output.finish_reason == "length" and not text.stopped else "stop",
            adapter=request.adapter,
            num_prompt_tokens=len(request.prompt_ids),
            num_completion_tokens=text.num_tokens,
            timings=output.timings,
            total_s=clock.elapsed_s,
            logprobs=text.logprobs if logprobs else (),
            request_id=request.request_id,
            domain=None if domain is None else domain.name,
            confidence=_confidence(text.logprobs),
        )
        self.metrics.answered(
            request,
            total_s=answer.total_s,
            first_s=first_s,
            queue_s=answer.timings.queue_s,
            num_completion=answer.num_completion_tokens,
        )
        yield answer

    async def _outputs(self, request: Request, clock: RequestClock) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs, each awaited within the deadline; closing early cancels the request."""
        stream = cast(AsyncGenerator[RequestOutput, None], self.engine.generate(request, clock.deadline))
        loop = asyncio.get_running_loop()
        self.quotas.count_tokens(request.tenant, len(request.prompt_ids))
        sent_ns, begun = time.time_ns(), False
        async with contextlib.aclosing(stream):
            with clock.bound():
                async for output in stream:
                    refused = output.error is not None and output.error.code in _REFUSED and not begun
                    begun = True
                    num_tokens = -len(request.prompt_ids) if refused else len(output.token_ids)
                    self.quotas.count_tokens(request.tenant, num_tokens)
                    if clock.trace is not None and output.finished:
                        clock.trace.answered(request, output, sent_ns)
                    yield output
                    if not output.finished and loop.time() > clock.deadline:
                        # Ready outputs need no wait, so a slow reader reaches its deadline here.
                        raise TimeoutError


def _confidence(tokens: Sequence[TokenLogprob]) -> float | None:
    """The probability of a text; None without log probabilities."""
    return math.exp(sum(token.logprob for token in tokens)) if tokens else None


def as_answer(result: HeadResult, request_id: str, domain: str) -> Answer:
    """The answer to a question that a head has answered: its label."""
    return Answer(
        text=result.label,
        finish_reason="stop",
        adapter=result.adapter,
        num_prompt_tokens=result.timings.num_prompt_tokens,
        num_completion_tokens=0,
        timings=result.timings,
        total_s=result.total_s,
        request_id=request_id,
        domain=domain,
        answered_by="head",
        confidence=result.confidence,
        result=result,
    )


def in_pixels(answer: HeadAnswer, shown: Sequence[Region]) -> HeadAnswer:
    """The result with box edges in pixels, clipped to the image. shown: the part of each image that the model saw."""
    if not answer.boxes:
        return answer
    boxes = tuple(_in_pixels(box, shown[box.image]) for box in answer.boxes)
    return msgspec.structs.replace(answer, boxes=boxes)


def _in_pixels(box: FoundBox, shown: Region) -> FoundBox:
    left, right = (shown.left + shown.width * min(1.0, max(0.0, edge)) for edge in (box.left, box.right))
    top, bottom = (shown.top + shown.height * min(1.0, max(0.0, edge)) for edge in (box.top, box.bottom))
    return msgspec.structs.replace(box, left=left, top=top, right=right, bottom=bottom)


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items in arrival order, with their stream's index. The first error or an early close ends all streams."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                arrived.put_nowait((place, item))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    running = len(tasks)
    try:
        while running:
            news = await arrived.get()
            if isinstance(news, asyncio.Task):
                news.result()
                running -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
