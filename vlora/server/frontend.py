"""The front end behind RPyC and HTTP: checks and prepares a request, calls the engine, and detokenizes the answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from vlora.client.values import Answer, HeadResult
from vlora.config import ServerConfig
from vlora.engine.cpu_cores import default_threads
from vlora.engine.interface import EngineInterface
from vlora.engine.snapshot import EngineSnapshot
from vlora.errors import (
    BadAdapter,
    BadRequest,
    DeadlineMissed,
    EngineDead,
    OverCapacity,
    TooLarge,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
    listed,
)
from vlora.server.detokenizer import MAX_STOP_CHARS, MAX_STOP_STRINGS, AnswerText, Piece
from vlora.server.head_results import in_pixels
from vlora.server.interleave import interleave
from vlora.server.media.image_decoding import RawImage, decode_images
from vlora.server.media.image_sources import ImageSources
from vlora.server.metrics import BASE, UNKNOWN, Metrics
from vlora.server.security.message_budget import ByteBudget
from vlora.server.streams.registry import Streams
from vlora.types import AdapterStatus, EngineStats, HeadSummary, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor

log = logging.getLogger(__name__)

T = TypeVar("T")

# A prompt of this size is ready in under 0.5 ms; a round trip to a thread takes as long on a busy core.
_SHORT_CHARS = 1000
_SHORT_TURNS = 4
_MOST_THREADS = 4  # that prepare requests; the cores belong to the engine
_SHOWN = 128  # characters of an unknown name, which may be as long as a message

Messages = Sequence[Mapping[str, Any]]
"""A conversation for a chat template; content entries are {"type": "image"} or {"type": "text", "text": ...}."""


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
"""A question (images are placed before it), a conversation, or a raw prompt."""

Image = bytes | RawImage | str
"""An encoded image, raw pixels, or the URL of an encoded one."""


class FrontEnd:
    """One per server, used from one event loop. Decoding and image processing run in threads."""

    def __init__(
        self, engine: EngineInterface, processor: InputProcessor, config: ServerConfig, model: str = ""
    ) -> None:
        """model: the base model's name; no adapter may have this name."""
        self.config = config
        self._model = model
        self._engine = engine
        self._processor = processor
        self._adapters: dict[str, AdapterStatus] | None = None
        self._sources = ImageSources(config)
        self.metrics = Metrics(model, importlib.metadata.version("vlora"))
        self.streams = Streams(self.ask_head, config, self.metrics)
        self.held = ByteBudget(config.max_held_bytes)
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._changes: set[asyncio.Task[Any]] = set()  # adapter changes in progress
        num_threads = min(_MOST_THREADS, default_threads())
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vlora-prepare")

    # -- answers ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        images: Sequence[Image] = (),
        *,
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        whole: bool = False,
    ) -> AsyncIterator[str | Answer]:
        """Yield text as it is decoded, then the complete Answer. Closing the iterator early cancels the request.

        Args:
            images: Encoded bytes or URLs, in order.
            max_latency_s, max_ttft_s, priority, tenant: As in `Request`.
            whole: The caller needs only the Answer.

        Raises:
            BadRequest: The request is invalid (or a subclass of BadRequest).
            OverCapacity, DeadlineMissed, DeadlineUnreachable, StepFailed, EngineDead: As in `vlora.errors`.
        """
        choices = self.choices(
            prompt,
            images,
            adapter=adapter,
            sampling=sampling,
            max_latency_s=max_latency_s,
            max_ttft_s=max_ttft_s,
            priority=priority,
            tenant=tenant,
            whole=whole,
        )
        async with contextlib.aclosing(choices):
            async for _, part in choices:
                if isinstance(part, Answer):
                    yield part
                elif part.text:
                    yield part.text

    async def choices(
        self,
        prompt: Prompt,
        images: Sequence[Image] = (),
        *,
        num_choices: int = 1,
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        """Yield several answers to one prompt concurrently, as `generate` does: each part with its choice's index.

        The first choice equals the answer of `generate`; the others sample with seeds derived from the first seed. Each
        choice counts as an active request.
        """
        sampling = sampling or SamplingParams()
        with self._admitted(adapter, tenant, num_choices) as clock:
            _check_text(prompt, sampling, self.config)
            status = None if adapter is None else await self._status(adapter)
            clock.found = True
            questions: set[str] = set()
            if images and status is not None and not _is_question(prompt):
                questions = {head.prompt for head in status.heads}
                if len(questions) == 1:
                    prompt = _with_question(prompt, *questions)
            empty = _is_empty(prompt)
            if empty and not images:
                raise BadRequest("the prompt is empty; send a text", field="prompt")
            encoded = await self._prepare(prompt, images, clock)
            if empty:  # checked late, so that image errors are reported first
                raise _no_question(adapter, questions)
            requests = [
                Request(
                    request_id=uuid.uuid4().hex,
                    prompt_ids=encoded.prompt_ids,
                    vision=encoded.vision,
                    adapter=adapter,
                    sampling=msgspec.structs.replace(sampling, seed=_seed_of_choice(sampling.seed, choice)),
                    max_latency_s=max_latency_s,
                    max_ttft_s=max_ttft_s,
                    priority=priority,
                    tenant=tenant,
                    # Stop strings require a check after each token.
                    whole=whole and not sampling.stop,
                )
                for choice in range(num_choices)
            ]
            parts = interleave([self._answer(request, clock) for request in requests])
            async with contextlib.aclosing(parts):
                async for choice, part in parts:
                    yield choice, part

    async def ask_head(
        self,
        images: Sequence[Image],
        adapter: str,
        head: str,
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> HeadResult:
        """Run one pass through a task head, with the question it was trained on.

        Raises:
            UnknownAdapter, UnknownHead: There is no such adapter or head.
            BadRequest: The number of images differs from the head's; other errors as in `generate`.
        """
        with self._admitted(adapter, tenant) as clock:
            status = await self._status(adapter)
            clock.found = True
            summary = _find_head(status, head, self._adapters or {})
            if len(images) != summary.num_frames:
                raise BadRequest(
                    f"head {head!r} of adapter {adapter!r} reads {summary.num_frames} "
                    f"image{'s' * (summary.num_frames != 1)} per request; got {len(images)}"
                )
            encoded = await self._prepare(summary.prompt, images, clock)
            request = Request(
                request_id=uuid.uuid4().hex,
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter=adapter,
                head=head,
                max_latency_s=max_latency_s,
                priority=priority,
                tenant=tenant,
            )
            async with self._outputs(request, clock) as outputs:
                *_, output = [output async for output in outputs]
            if output.error is not None:
                raise output.error.to_exception()
            assert output.head is not None and output.timings is not None, "a head request ends with a head result"
            result = HeadResult(
                **msgspec.structs.asdict(in_pixels(output.head, encoded.shown)),
                adapter=adapter,
                head=head,
                timings=output.timings,
                total_s=clock.elapsed_s,
            )
            total_s, queue_s = result.total_s, output.timings.queue_s
            self.metrics.answered(request, total_s=total_s, first_s=total_s, queue_s=queue_s, num_completion=0)
            return result

    async def _answer(self, request: Request, clock: _Clock) -> AsyncGenerator[Piece | Answer, None]:
        """Yield one request's pieces, then its Answer. Raises the request's error."""
        sampling = request.sampling
        text = AnswerText(self._processor.decode, self._processor.token_text, sampling.stop, sampling.min_tokens)
        num_tokens = 0
        asked_s, first_s = clock.elapsed_s, 0.0
        async with self._outputs(request, clock) as outputs:
            async for output in outputs:
                if output.token_ids and not num_tokens:
                    first_s = clock.elapsed_s
                if not text.stopped:  # drop tokens that arrive before the engine cancels
                    num_tokens += len(output.token_ids)
                    piece = text.feed(output.token_ids, output.scores)
                    if piece.text:
                        yield piece._replace(
                            num_prompt_tokens=len(request.prompt_ids), num_completion_tokens=num_tokens
                        )
                    if text.stopped and not output.finished:
                        await self._engine.cancel(request.request_id)
        if output.error is not None and (output.timings is None or not text.stopped):
            raise output.error.to_exception()
        piece = text.finish()
        if piece.text:
            yield piece._replace(num_prompt_tokens=len(request.prompt_ids), num_completion_tokens=num_tokens)
        assert output.timings is not None, "an answered request has timings"
        if request.whole and output.timings.ttft_s is not None:
            first_s = asked_s + output.timings.ttft_s
        answer = Answer(
            text=text.text,
            finish_reason="length" if output.finish_reason == "length" and not text.stopped else "stop",
            adapter=request.adapter,
            num_prompt_tokens=len(request.prompt_ids),
            num_completion_tokens=num_tokens,
            timings=output.timings,
            total_s=clock.elapsed_s,
            logprobs=text.logprobs,
        )
        self.metrics.answered(
            request,
            total_s=answer.total_s,
            first_s=first_s,
            queue_s=answer.timings.queue_s,
            num_completion=answer.num_completion_tokens,
        )
        yield answer

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template supports tools, tool calls and their results."""
        return self._processor.takes_tools

    # -- adapters and counters ----------------------------------------------------------------------------------------

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        statuses = await self._engine.adapters()
        self._adapters = {status.name: status for status in statuses}
        self.metrics.expect(self._adapters)
        return statuses

    def engine_changed(self) -> None:
        """Forget cached adapters and start held frames: the engine was replaced, or no replacement will start."""
        self._adapters = None
        self.streams.go_on()

    async def known_adapters(self) -> tuple[AdapterStatus, ...]:
        """As `adapters`, cached since the last registration or removal; fields that change otherwise may be stale."""
        return await self.adapters() if self._adapters is None else tuple(self._adapters.values())

    async def find_head(self, adapter: str, head: str) -> HeadSummary:
        """Raises UnknownAdapter or UnknownHead, each with the available names."""
        return _find_head(await self._status(adapter), head, self._adapters or {})

    async def register_adapters(self, paths: Mapping[str, str]) -> None:
        """Register adapter folders by name, all or none; the files are read at first use. Raises BadAdapter."""
        for name in paths:
            self._check_name(name)
        await self._engine.register_adapters(paths)
        self._adapters = None

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder on the server's file system. Raises BadAdapter with the reason."""
        self._check_name(name)
        return await self._completely(self._engine.load_adapter(name, path))

    async def unload_adapter(self, name: str, drain: bool = False) -> None:
        """Remove an adapter and cancel its requests, or with `drain` let them finish. Raises UnknownAdapter."""
        await self._completely(self._engine.unload_adapter(name, drain))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin an adapter on the device, or unpin it. Raises UnknownAdapter; OverCapacity when there is no room."""
        return await self._completely(self._engine.pin_adapter(name, pinned))

    async def stats(self) -> EngineStats:
        """The engine's stats with the model's name in place of its folder, which is not exposed to clients."""
        return self._named(await self._engine.stats())

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        snapshot = await self._engine.snapshot(since)
        return msgspec.structs.replace(snapshot, stats=self._named(snapshot.stats))

    async def read_metrics(self) -> bytes:
        """All metrics in Prometheus text format, also when the engine is dead."""
        try:
            stats, adapters = await self.stats(), await self.adapters()
        except EngineDead:
            return self.metrics.render(None)
        return self.metrics.render(stats, adapters)

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    async def drain(self) -> None:
        """Refuse new requests and wait up to `drain_s` seconds for active ones to end."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self._idle.wait()

    async def close(self) -> None:
        self.streams.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._sources.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _completely(self, change: Coroutine[Any, Any, T]) -> T:
        """Apply a change of the engine's adapters. A started change completes even when its caller is cancelled, so the
        cache of adapters here and below must not depend on the caller."""

        async def work() -> T:
            try:
                return await change
            finally:
                self._adapters = None

        task = asyncio.create_task(work())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        # Retrieve the error when the caller was cancelled.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    @contextlib.contextmanager
    def _admitted(self, adapter: str | None, tenant: str | None, num_choices: int = 1) -> Iterator[_Clock]:
        """Count a request, its end and its outcome. Raises OverCapacity when there is no room for it."""
        outcome = "cancelled"
        clock = _Clock(self.config.request_timeout_s)
        try:
            with self._counted_in(num_choices):
                yield clock
            outcome = "ok"
        except VLoraError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = VLoraError.code
            raise
        finally:
            self.metrics.count(outcome, (adapter or BASE) if clock.found else UNKNOWN, tenant)
            fields = {"outcome": outcome, "seconds": round(clock.elapsed_s, 4), "choices": num_choices}
            log.info("a request ended", extra={"fields": fields})

    @contextlib.contextmanager
    def _counted_in(self, num_choices: int) -> Iterator[None]:
        if self._draining:
            raise OverCapacity("the server is shutting down and accepts no new requests")
        if num_choices > self.config.max_requests:
            raise BadRequest(f"n is {num_choices}; this server allows at most {self.config.max_requests}", field="n")
        if self._num_active + num_choices > self.config.max_requests:
            raise OverCapacity(
                f"{self._num_active} requests are in progress; this server's limit is {self.config.max_requests}; "
                "try again later"
            )
        self._num_active += num_choices
        self.metrics.active(num_choices)
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= num_choices
            self.metrics.active(-num_choices)
            if self._num_active == 0:
                self._idle.set()

    def _named(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(stats, model=self._model)

    def _check_name(self, name: str) -> None:
        if name == self._model:
            raise BadAdapter(f"{name!r} is the base model's name; choose another name for the adapter")

    async def _status(self, name: str) -> AdapterStatus:
        """Raises UnknownAdapter with the available names."""
        if self._adapters is None or name not in self._adapters:
            await self.adapters()
        assert self._adapters is not None
        if name not in self._adapters:
            known = listed(self._adapters)
            raise UnknownAdapter(f"no adapter named {name[:_SHOWN]!r}; registered: {known}", field="adapter")
        return self._adapters[name]

    async def _prepare(self, prompt: Prompt, images: Sequence[Image], clock: _Clock) -> EncodedPrompt:
        """Fetch, decode, template, tokenize and process images off the event loop; short prompts stay on it."""

        def work(encoded: Sequence[bytes | RawImage]) -> EncodedPrompt:
            pixels = decode_images(encoded, self.config)
            match prompt:
                case PromptTokens():
                    return self._processor.as_given(prompt.token_ids)
                case PlainText():
                    return self._processor.encode(prompt.text)
                case str():
                    return self._processor.encode(self._processor.chat(prompt, len(pixels)), pixels)
                case Conversation():
                    return self._processor.encode(self._processor.template(prompt.messages, prompt.tools), pixels)
            return self._processor.encode(self._processor.template(prompt), pixels)

        if not images and _is_short(prompt):
            return work(())
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                encoded = await self._sources.read(images)
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, encoded)

    @contextlib.asynccontextmanager
    async def _outputs(self, request: Request, clock: _Clock) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """The engine's outputs, each awaited within the deadline; closing early cancels the request."""
        stream = cast(AsyncGenerator[RequestOutput, None], self._engine.generate(request, clock.deadline))
        loop = asyncio.get_running_loop()

        async def timed() -> AsyncIterator[RequestOutput]:
            with clock.bound():
                async for output in stream:
                    yield output
                    if not output.finished and loop.time() > clock.deadline:
                        # Ready outputs need no wait, so a slow reader reaches its deadline here.
                        raise TimeoutError

        async with contextlib.aclosing(stream):
            yield timed()


class _Clock:
    """One request's arrival time and deadline. found: whether its adapter is registered, or the request names none."""

    def __init__(self, timeout_s: float) -> None:
        self.found = False
        self._timeout_s = timeout_s
        self._arrived = time.monotonic()
        self.deadline = asyncio.get_running_loop().time() + timeout_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Convert a timeout into DeadlineMissed."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineMissed(
                f"the request was not answered within {self._timeout_s:g} s, which is this server's limit"
            ) from error


def _seed_of_choice(seed: int | None, choice: int) -> int | None:
    """The seed of a choice. Without a seed every request samples from its own id."""
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=7).digest())


def _check_text(prompt: Prompt, sampling: SamplingParams, config: ServerConfig) -> None:
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


def _is_empty(prompt: Prompt) -> bool:
    """Whether the prompt has no content. A plain text of blanks counts as content."""
    if isinstance(prompt, PlainText | PromptTokens):
        return not any(prompt)
    return not any(text.strip() for text in _texts(prompt))


def _is_question(prompt: Prompt) -> bool:
    """Whether the prompt contains a question. Tools and a system message are not a question."""
    match prompt:
        case str() | PlainText() | PromptTokens():
            return not _is_empty(prompt)
        case Conversation():
            return _is_question(prompt.messages)
    return not _is_empty([message for message in prompt if message["role"] != "system"])


def _with_question(prompt: Prompt, question: str) -> Prompt:
    """A prompt of images only, completed with an adapter's question."""
    match prompt:
        case str():
            return question
        case Conversation():
            return prompt._replace(messages=cast(Messages, _with_question(prompt.messages, question)))
        case PlainText() | PromptTokens():
            return prompt
    *before, last = prompt
    content = [] if isinstance(last["content"], str) else list(last["content"])
    return [*before, {**last, "content": [*content, {"type": "text", "text": question}]}]


def _no_question(adapter: str | None, questions: Collection[str]) -> BadRequest:
    """The error for images without text."""
    if adapter is None:
        why = "the base model has no default question"
    elif not questions:
        why = f"adapter {adapter!r} has no default question"
    else:
        why = f"adapter {adapter!r} has several questions: {listed(sorted(questions))}"
    return BadRequest(f"the prompt has images but no text, and {why}; send a question with the images", field="prompt")


def _is_short(prompt: Prompt) -> bool:
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


def _find_head(status: AdapterStatus, head: str, adapters: Mapping[str, AdapterStatus]) -> HeadSummary:
    """Raises UnknownHead with the adapter's heads, and with other adapters that have a head of that name."""
    for summary in status.heads:
        if summary.name == head:
            return summary
    known = ", ".join(summary.name for summary in status.heads) or "none"
    owners = [repr(other.name) for other in adapters.values() if any(summary.name == head for summary in other.heads)]
    hint = f"; head {head!r} belongs to adapter {listed(owners)}" if owners else ""
    raise UnknownHead(f"adapter {status.name!r} has no head {head[:_SHOWN]!r}; its heads: {known}{hint}")
