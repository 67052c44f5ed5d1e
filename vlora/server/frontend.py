"""What every surface (RPyC, HTTP) calls: checks a request, prepares it, asks the engine, turns tokens into text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from vlora.client.values import Answer, HeadResult
from vlora.config import ServerConfig
from vlora.engine.interface import EngineInterface
from vlora.errors import BadRequest, DeadlineMissed, OverCapacity, TooLarge, UnknownAdapter, UnknownHead
from vlora.server.images import decode_images
from vlora.server.text import AnswerText
from vlora.types import AdapterStatus, EngineStats, HeadSummary, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor

MAX_STOP_STRINGS = 16

Messages = Sequence[Mapping[str, Any]]
"""A conversation as chat templates take it; content entries are {"type": "image"} or {"type": "text", "text": ...}."""


class FrontEnd:
    """One per server; belongs to one event loop. Decoding and image processing run in threads beside it."""

    def __init__(self, engine: EngineInterface, processor: InputProcessor, config: ServerConfig) -> None:
        self.config = config
        self._engine = engine
        self._processor = processor
        self._adapters: dict[str, AdapterStatus] | None = None
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="vlora-prepare")

    # -- answers ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Messages,
        images: Sequence[bytes] = (),
        *,
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        max_latency_s: float | None = None,
    ) -> AsyncIterator[str | Answer]:
        """Pieces of text as they become certain, then the whole Answer. Closing the iterator early cancels the request.

        prompt: a question (the images go before it) or whole messages. images: encoded bytes, in order.
        Raises BadRequest's kinds for a request that is wrong, OverCapacity, DeadlineMissed, StepFailed, EngineDead.
        """
        sampling = sampling or SamplingParams()
        with self._admitted() as clock:
            _check_text(prompt, sampling, self.config)
            if adapter is not None:
                await self._status(adapter)
            encoded = await self._prepare(prompt, images, clock)
            request = Request(
                request_id=uuid.uuid4().hex,
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter=adapter,
                sampling=sampling,
                max_latency_s=max_latency_s,
            )
            text = AnswerText(self._processor.decode, sampling.stop)
            num_tokens = 0
            async with self._outputs(request, clock) as outputs:
                async for output in outputs:
                    num_tokens += len(output.token_ids)
                    if not text.stopped:
                        if piece := text.feed(output.token_ids):
                            yield piece
                        if text.stopped and not output.finished:
                            await self._engine.cancel(request.request_id)
            if output.error is not None and (output.timings is None or not text.stopped):
                raise output.error.to_exception()
            if piece := text.finish():
                yield piece
            assert output.timings is not None, "a request that was answered has timings"
            yield Answer(
                text=text.text,
                finish_reason="length" if output.finish_reason == "length" and not text.stopped else "stop",
                adapter=adapter,
                num_prompt_tokens=len(request.prompt_ids),
                num_completion_tokens=num_tokens,
                timings=output.timings,
                total_s=clock.elapsed_s,
            )

    async def ask_head(
        self, images: Sequence[bytes], adapter: str, head: str, *, max_latency_s: float | None = None
    ) -> HeadResult:
        """One pass through a task head, with the question it was trained on.

        Raises UnknownAdapter, UnknownHead, BadRequest when the head wants another number of images; else as `generate`.
        """
        with self._admitted() as clock:
            summary = _find_head(await self._status(adapter), head, self._adapters or {})
            if len(images) != summary.num_frames:
                raise BadRequest(
                    f"head {head!r} of adapter {adapter!r} reads {summary.num_frames} "
                    f"image{'s' * (summary.num_frames != 1)} per request; {len(images)} came"
                )
            encoded = await self._prepare(summary.prompt, images, clock)
            request = Request(
                request_id=uuid.uuid4().hex,
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter=adapter,
                head=head,
                max_latency_s=max_latency_s,
            )
            async with self._outputs(request, clock) as outputs:
                *_, output = [output async for output in outputs]
            if output.error is not None:
                raise output.error.to_exception()
            assert output.head is not None and output.timings is not None, "a head request ends with its head's answer"
            return HeadResult(
                label=output.head.label,
                label_id=output.head.label_id,
                labels=summary.labels,
                scores=output.head.scores,
                adapter=adapter,
                head=head,
                timings=output.timings,
                total_s=clock.elapsed_s,
            )

    # -- adapters and counters ----------------------------------------------------------------------------------------

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        statuses = await self._engine.adapters()
        self._adapters = {status.name: status for status in statuses}
        return statuses

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder of the server's file system. Raises BadAdapter with the reason."""
        status = await self._engine.load_adapter(name, path)
        self._adapters = None
        return status

    async def unload_adapter(self, name: str) -> None:
        """Cancel the adapter's requests and forget it. Raises UnknownAdapter."""
        await self._engine.unload_adapter(name)
        self._adapters = None

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more requests and give those under way `drain_s` seconds to end."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self._idle.wait()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[_Clock]:
        """Count a request in and out. Raises OverCapacity when there is no room for it."""
        if self._draining:
            raise OverCapacity("the server is shutting down; it takes no new requests")
        if self._num_active >= self.config.max_requests:
            raise OverCapacity(
                f"{self._num_active} requests are under way, which is this server's limit; try again later"
            )
        self._num_active += 1
        self._idle.clear()
        try:
            yield _Clock(self.config.request_timeout_s)
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    async def _status(self, name: str) -> AdapterStatus:
        """Raises UnknownAdapter with the names there are."""
        if self._adapters is None or name not in self._adapters:
            await self.adapters()
        assert self._adapters is not None
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise UnknownAdapter(f"no adapter named {name!r}; registered: {known}")
        return self._adapters[name]

    async def _prepare(self, prompt: str | Messages, images: Sequence[bytes], clock: _Clock) -> EncodedPrompt:
        """Decode, template, tokenize and process images, off the event loop."""

        def work() -> EncodedPrompt:
            pixels = decode_images(images, self.config)
            if isinstance(prompt, str):
                return self._processor.encode(self._processor.chat(prompt, len(pixels)), pixels)
            return self._processor.encode(self._processor.template(prompt), pixels)

        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextlib.asynccontextmanager
    async def _outputs(self, request: Request, clock: _Clock) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """The engine's outputs, each awaited within the deadline; leaving early cancels the request."""
        stream = cast(AsyncGenerator[RequestOutput, None], self._engine.generate(request))

        async def timed() -> AsyncIterator[RequestOutput]:
            finished = False
            while not finished:
                with clock.bound():
                    async with asyncio.timeout_at(clock.deadline):
                        output = await anext(stream)
                finished = output.finished
                yield output

        async with contextlib.aclosing(stream):
            yield timed()


class _Clock:
    """One request's time: when it arrived and until when it may take."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._arrived = time.monotonic()
        self.deadline = asyncio.get_running_loop().time() + timeout_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Name a timeout for what it is."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineMissed(
                f"the request was not answered within {self._timeout_s:g} s, which is this server's limit"
            ) from error


def _check_text(prompt: str | Messages, sampling: SamplingParams, config: ServerConfig) -> None:
    texts = [prompt] if isinstance(prompt, str) else list(_texts(prompt))
    if not any(text.strip() for text in texts):
        raise BadRequest("the prompt is empty; ask something")
    length = sum(len(text) for text in texts)
    if length > config.max_prompt_chars:
        raise TooLarge(f"the prompt has {length} characters; this server takes at most {config.max_prompt_chars}")
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop holds {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are looked for")


def _texts(messages: Messages) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")


def _find_head(status: AdapterStatus, head: str, adapters: Mapping[str, AdapterStatus]) -> HeadSummary:
    """Raises UnknownHead with the heads there are, and the adapter that has one of that name."""
    for summary in status.heads:
        if summary.name == head:
            return summary
    known = ", ".join(summary.name for summary in status.heads) or "none"
    owners = sorted(other.name for other in adapters.values() if any(summary.name == head for summary in other.heads))
    hint = f"; head {head!r} belongs to adapter {' and '.join(map(repr, owners))}" if owners else ""
    raise UnknownHead(f"adapter {status.name!r} has no head {head!r}; its heads: {known}{hint}")
