"""What every surface (RPyC, HTTP) calls: checks a request, prepares it, asks the engine, turns tokens into text."""

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

# A prompt of this size is ready in under half a millisecond; the way to a thread and back takes as long on a busy core.
_SHORT_CHARS = 1000
_SHORT_TURNS = 4
_MOST_THREADS = 4  # that prepare requests: the cores are the engine's
_SHOWN = 128  # of a name that nobody has: it may be as long as a message

Messages = Sequence[Mapping[str, Any]]
"""A conversation as chat templates take it; content entries are {"type": "image"} or {"type": "text", "text": ...}."""


class PlainText(NamedTuple):
    """A prompt as it is: no chat template, no images."""

    text: str


class PromptTokens(NamedTuple):
    """A prompt as token ids of the model's tokenizer."""

    token_ids: tuple[int, ...]


class Conversation(NamedTuple):
    """Messages for a chat template that takes tools (`FrontEnd.takes_tools`). tools: as OpenAI's API declares them."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]]


Prompt = str | Messages | PlainText | PromptTokens | Conversation
"""A question (the images go before it), a conversation, or what goes to the model as it is."""

Image = bytes | RawImage | str
"""An encoded image, raw pixels, or the URL of an encoded one."""


class FrontEnd:
    """One per server; belongs to one event loop. Decoding and image processing run in threads beside it."""

    def __init__(
        self, engine: EngineInterface, processor: InputProcessor, config: ServerConfig, model: str = ""
    ) -> None:
        """model: the base model's name, which no adapter may take."""
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
        self._changes: set[asyncio.Task[Any]] = set()  # of adapters, under way
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
        """Pieces of text as they become certain, then the whole Answer. Closing the iterator early cancels the request.

        images: encoded bytes or URLs, in order.
        max_latency_s, max_ttft_s, priority, tenant: as of `Request`. whole: the caller reads nothing but the Answer.
        Raises BadRequest's kinds for a request that is wrong, OverCapacity, DeadlineMissed, DeadlineUnreachable,
        StepFailed, EngineDead.
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
        """As `generate`, several answers to one prompt side by side: each part with its choice's number.

        The first choice is the answer `generate` gives; the others draw with seeds made from the first one's. Each
        counts as a request under way.
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
                raise BadRequest("the prompt is empty; ask something", field="prompt")
            encoded = await self._prepare(prompt, images, clock)
            if empty:  # only now, so that what is wrong with the images comes first
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
                    # With strings to stop at, the text is looked at token by token.
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
        """One pass through a task head, with the question it was trained on.

        Raises UnknownAdapter, UnknownHead, BadRequest when the head wants another number of images; else as `generate`.
        """
        with self._admitted(adapter, tenant) as clock:
            status = await self._status(adapter)
            clock.found = True
            summary = _find_head(status, head, self._adapters or {})
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
                priority=priority,
                tenant=tenant,
            )
            async with self._outputs(request, clock) as outputs:
                *_, output = [output async for output in outputs]
            if output.error is not None:
                raise output.error.to_exception()
            assert output.head is not None and output.timings is not None, "a head request ends with its head's answer"
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
        """One request's pieces, then its Answer. Raises the error it ended with."""
        sampling = request.sampling
        text = AnswerText(self._processor.decode, self._processor.token_text, sampling.stop, sampling.min_tokens)
        num_tokens = 0
        asked_s, first_s = clock.elapsed_s, 0.0
        async with self._outputs(request, clock) as outputs:
            async for output in outputs:
                if output.token_ids and not num_tokens:
                    first_s = clock.elapsed_s
                if not text.stopped:  # what still comes until the engine hears of it is no part of the answer
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
        assert output.timings is not None, "a request that was answered has timings"
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
        """Whether the model's chat template has a place for tools, calls and their results."""
        return self._processor.takes_tools

    # -- adapters and counters ----------------------------------------------------------------------------------------

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        statuses = await self._engine.adapters()
        self._adapters = {status.name: status for status in statuses}
        self.metrics.expect(self._adapters)
        return statuses

    def engine_changed(self) -> None:
        """Another engine serves, whose adapters are asked for again, or none will: what was held for it goes on."""
        self._adapters = None
        self.streams.go_on()

    async def known_adapters(self) -> tuple[AdapterStatus, ...]:
        """As `adapters`, from memory where nothing was registered or removed since: what changes by itself is old."""
        return await self.adapters() if self._adapters is None else tuple(self._adapters.values())

    async def find_head(self, adapter: str, head: str) -> HeadSummary:
        """Raises UnknownAdapter, UnknownHead with the names there are."""
        return _find_head(await self._status(adapter), head, self._adapters or {})

    async def register_adapters(self, paths: Mapping[str, str]) -> None:
        """Register adapter folders by name, all or none; their content is read at first use. Raises BadAdapter."""
        for name in paths:
            self._check_name(name)
        await self._engine.register_adapters(paths)
        self._adapters = None

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder of the server's file system. Raises BadAdapter with the reason."""
        self._check_name(name)
        return await self._completely(self._engine.load_adapter(name, path))

    async def unload_adapter(self, name: str, drain: bool = False) -> None:
        """Forget an adapter, cancelling its requests or, with `drain`, letting them finish. Raises UnknownAdapter."""
        await self._completely(self._engine.unload_adapter(name, drain))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Keep an adapter on the device, or let it go. Raises UnknownAdapter, OverCapacity when there is no room."""
        return await self._completely(self._engine.pin_adapter(name, pinned))

    async def stats(self) -> EngineStats:
        """With the model's name: the engine knows it by its folder, which is nobody's business outside."""
        return self._named(await self._engine.stats())

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        snapshot = await self._engine.snapshot(since)
        return msgspec.structs.replace(snapshot, stats=self._named(snapshot.stats))

    async def read_metrics(self) -> bytes:
        """Prometheus' text form of everything that is counted, a dead engine included."""
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
        """Take no more requests and give those under way `drain_s` seconds to end."""
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
        """Change the engine's adapters. A change that was begun takes effect even where its caller leaves, so what is
        remembered of it here and below must not depend on the caller."""

        async def work() -> T:
            try:
                return await change
            finally:
                self._adapters = None

        task = asyncio.create_task(work())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        # Where the caller has left, an error has no other reader.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    @contextlib.contextmanager
    def _admitted(self, adapter: str | None, tenant: str | None, num_choices: int = 1) -> Iterator[_Clock]:
        """Count a request in and out, and what became of it. Raises OverCapacity when there is no room for it."""
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
            raise OverCapacity("the server is shutting down; it takes no new requests")
        if num_choices > self.config.max_requests:
            raise BadRequest(
                f"{num_choices} choices were asked for; this server answers {self.config.max_requests}", field="n"
            )
        if self._num_active + num_choices > self.config.max_requests:
            raise OverCapacity(
                f"{self._num_active} requests are under way; this server's limit is {self.config.max_requests}; "
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
            raise BadAdapter(f"{name!r} is the base model's name; requests could not tell them apart. Choose another")

    async def _status(self, name: str) -> AdapterStatus:
        """Raises UnknownAdapter with the names there are."""
        if self._adapters is None or name not in self._adapters:
            await self.adapters()
        assert self._adapters is not None
        if name not in self._adapters:
            known = listed(self._adapters)
            raise UnknownAdapter(f"no adapter named {name[:_SHOWN]!r}; registered: {known}", field="adapter")
        return self._adapters[name]

    async def _prepare(self, prompt: Prompt, images: Sequence[Image], clock: _Clock) -> EncodedPrompt:
        """Fetch; then decode, template, tokenize and process images off the event loop, but for a few words."""

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
        """The engine's outputs, each awaited within the deadline; leaving early cancels the request."""
        stream = cast(AsyncGenerator[RequestOutput, None], self._engine.generate(request, clock.deadline))
        loop = asyncio.get_running_loop()

        async def timed() -> AsyncIterator[RequestOutput]:
            with clock.bound():
                async for output in stream:
                    yield output
                    if not output.finished and loop.time() > clock.deadline:
                        # Outputs that are there already are not waited for: a caller that reads slowly ends here.
                        raise TimeoutError

        async with contextlib.aclosing(stream):
            yield timed()


class _Clock:
    """One request's time: when it arrived and until when it may take. found: its adapter is registered, or it needs
    none."""

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
        """Name a timeout for what it is."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineMissed(
                f"the request was not answered within {self._timeout_s:g} s, which is this server's limit"
            ) from error


def _seed_of_choice(seed: int | None, choice: int) -> int | None:
    """Without a seed every request draws by its own id."""
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
                f"the prompt holds half a character (a lone surrogate) at place {error.start} of {text[:20]!r}...",
                field="prompt",
            ) from error
    length = sum(len(text) for text in texts)
    if length > config.max_prompt_chars:
        raise TooLarge(
            f"the prompt has {length} characters; this server takes at most {config.max_prompt_chars}", field="prompt"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise BadRequest(
            f"stop holds {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are looked for", field="stop"
        )
    longest = max(map(len, sampling.stop), default=0)
    if longest > MAX_STOP_CHARS:
        raise BadRequest(
            f"a stop string has {longest} characters; at most {MAX_STOP_CHARS} are looked for", field="stop"
        )


def _is_empty(prompt: Prompt) -> bool:
    """Whether there is nothing to answer. A plain text of blanks is continued as any other."""
    if isinstance(prompt, PlainText | PromptTokens):
        return not any(prompt)
    return not any(text.strip() for text in _texts(prompt))


def _is_question(prompt: Prompt) -> bool:
    """Whether the caller asks in words of its own: tools and a system message say how to answer, not what."""
    match prompt:
        case str() | PlainText() | PromptTokens():
            return not _is_empty(prompt)
        case Conversation():
            return _is_question(prompt.messages)
    return not _is_empty([message for message in prompt if message["role"] != "system"])


def _with_question(prompt: Prompt, question: str) -> Prompt:
    """A prompt of images alone, with an adapter's question."""
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
    """Why images without text are no request."""
    if adapter is None:
        why = "the base model has no question of its own"
    elif not questions:
        why = f"adapter {adapter!r} has no question of its own"
    else:
        why = f"adapter {adapter!r} has several questions: {listed(sorted(questions))}"
    return BadRequest(f"the prompt has images and no text, and {why}; send a question with them", field="prompt")


def _is_short(prompt: Prompt) -> bool:
    """Whether a thread would cost a prompt without images more than it spares the event loop."""
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
    """Raises UnknownHead with the heads there are, and the adapter that has one of that name."""
    for summary in status.heads:
        if summary.name == head:
            return summary
    known = ", ".join(summary.name for summary in status.heads) or "none"
    owners = [repr(other.name) for other in adapters.values() if any(summary.name == head for summary in other.heads)]
    hint = f"; head {head!r} belongs to adapter {listed(owners)}" if owners else ""
    raise UnknownHead(f"adapter {status.name!r} has no head {head[:_SHOWN]!r}; its heads: {known}{hint}")
