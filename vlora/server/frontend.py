"""The front end behind RPyC and HTTP: checks and prepares a request, calls the engine, and detokenizes the answer.

A request passes `FrontEnd.generate` (or `ask_head`), `ActiveRequests.admit`, `PromptEncoder.encode`, the engine's
`generate`, and `AnswerText.feed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vlora.client.values import Answer, HeadOutcome, HeadResult
from vlora.cluster.cluster import Cluster
from vlora.config import ServerConfig
from vlora.engine.interface import EngineInterface
from vlora.engine.ipc.supervisor import RestartedEngine
from vlora.engine.snapshot import EngineSnapshot
from vlora.errors import BadRequest, EngineDead, UnknownAdapter, UnknownHead, VLoraError
from vlora.server.active_requests import ActiveRequests, RequestClock
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.detokenizer import Piece
from vlora.server.domains import Target, answering
from vlora.server.execution import Execution, as_answer, interleave
from vlora.server.metrics import Families, Metrics, camera_families, cluster_families
from vlora.server.prompts import (
    NO_LEVEL,
    Conversation,
    Image,
    Images,
    Level,
    Prompt,
    PromptEncoder,
    SharedImages,
    TextRequest,
    as_prompt,
    check_text,
    has_question,
    is_empty,
    missing_question,
    visuals_of,
    with_question,
)
from vlora.server.received_adapters import ReceivedAdapters
from vlora.server.security.limits import ByteBudget, Quotas
from vlora.server.security.public_errors import to_vlora_error
from vlora.server.streams.cameras import Cameras
from vlora.server.streams.registry import StreamRegistry
from vlora.types import EngineStats, ErrorValue, HeadAnswer, Request, SamplingParams, Timings
from vlora.types.composition import BASE
from vlora.types.request import Pooling

if TYPE_CHECKING:
    from vlora.learning.learning import Learning
    from vlora.learning.plan import LearningEntry
    from vlora.models.processing import EncodedPrompt, InputProcessor
    from vlora.server.served_learning import Collector
    from vlora.tracing import Tracing


class FrontEnd:
    """One per server, used from one event loop. Decoding and image processing run in threads.

    learning: the adapters that learn. message_budget: the bytes of messages in memory, over all connections. cameras:
    those that the server reads; None if the operator allows none. received: adapters that the server gets itself.
    """

    def __init__(
        self,
        engine: EngineInterface,
        processor: InputProcessor,
        config: ServerConfig,
        model: str = "",
        *,
        supervisor: RestartedEngine | None = None,
    ) -> None:
        """model: the base model's name; no adapter may have this name. supervisor: the engine, if it is restarted."""
        self.config = config
        self._model = model
        self.engine = engine
        self._supervisor = supervisor
        self.processor = processor
        self._encoder = PromptEncoder(processor, config)
        self.metrics = Metrics(model, importlib.metadata.version("vlora"))
        self.adapters = AdapterCatalog(engine, self.metrics, model, processor)
        self.quotas = Quotas(config.tokens)
        self.tracing: Tracing | None = None
        if config.tracing:
            from vlora.tracing import Tracing  # imports OpenTelemetry, which is an extra

            self.tracing = Tracing(model)
        self._execution = Execution(engine, processor, self._encoder, self.metrics, self.quotas)
        self.streams = StreamRegistry(self, config, self.metrics)
        self.message_budget = ByteBudget(config.max_held_bytes)
        self._requests = ActiveRequests(config, self.metrics, self.quotas, self.tracing)
        self.learning: Learning | None = None
        self._collector: Collector | None = None
        self.cameras: Cameras | None = None
        self.received: ReceivedAdapters | None = None
        self.metrics.register(
            Families(lambda: camera_families(() if self.cameras is None else self.cameras.statuses()))
        )
        self.cluster = cluster = engine if isinstance(engine, Cluster) else None
        if cluster is not None:
            self.metrics.register(Families(lambda: cluster_families(cluster.status())))

    def learn(
        self,
        folder: Path,
        entries: list[LearningEntry],
        initial: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> dict[str, str]:
        """Let adapters learn. Returns the folders to register by name. Arguments and exceptions: see `Learning`."""
        from vlora.learning.learning import Learning  # imports torch
        from vlora.server.served_learning import Collector, EngineModel

        model = EngineModel(self.engine, self.adapters, self._encoder, self.processor, self.config)
        self.learning = Learning(folder, entries, initial, model, clock=clock)
        self._collector = Collector(self.learning)
        self.adapters.learning = frozenset(self.learning.folders)
        return self.learning.folders

    # -- answers ------------------------------------------------------------------------------------------------------

    async def generate(
        self, asked: TextRequest, request_id: str | None = None
    ) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        """Yield text as it is decoded, then the complete Answer, each with the index of its choice.

        Choices are generated concurrently. The first equals the answer to a request for one; the others sample with
        seeds derived from the first seed. Closing the iterator early cancels the request.

        request_id: of the first choice, unused so far; a random one by default.

        Raises:
            BadRequest: The request is invalid (or a subclass of BadRequest).
            OverCapacity, DeadlineMissed, DeadlineUnreachable, StepFailed, EngineDead: As in `vlora.errors`.
        """
        request_id = request_id or uuid.uuid4().hex
        images, sampling = asked.images, asked.sampling
        prompt = as_prompt(asked.prompt, visuals_of(images))
        asked = asked._replace(prompt=prompt)
        operation = "chat" if isinstance(prompt, Conversation) else "text_completion"
        with self._requests.admit(asked.level.tenant, operation, asked.num_choices) as clock:
            check_text(prompt, sampling, self.config)
            while True:
                target = None if asked.adapter is None else await self.adapters.resolve(asked.adapter)
                adapter = None if target is None else target.adapter
                clock.adapter = adapter or BASE
                domain, head = answering(target, asked)
                if head is not None:
                    assert asked.adapter is not None and domain is not None
                    try:
                        result = await self._by_head(images, asked.adapter, head.name, clock, request_id, asked.level)
                    except UnknownHead:
                        if answering(await self.adapters.resolve(asked.adapter), asked) == (domain, head):
                            raise
                        continue  # the domain has moved meanwhile, and is answered otherwise
                    if result.label:
                        yield 0, Piece(result.label, num_prompt_tokens=result.timings.num_prompt_tokens)
                    yield 0, as_answer(result, request_id, domain.name)
                    return
                kept = None if self._collector is None else self._collector.question_of(prompt, images, adapter)
                if kept is not None and not isinstance(images, SharedImages):
                    images = await self._encoder.read(cast(Sequence[Image], images), clock)
                encoded = await self._encode(prompt, images, target, clock)
                if asked.adapter is None or (await self.adapters.resolve(asked.adapter)).adapter == adapter:
                    break  # else the domain has moved to another adapter meanwhile
            logprobs = sampling.logprobs is not None
            if domain is not None and not logprobs:  # for the confidence
                sampling = msgspec.structs.replace(sampling, logprobs=0)
            requests = [
                Request(
                    request_id=choice_id(request_id, choice),
                    prompt_ids=encoded.prompt_ids,
                    vision=encoded.vision,
                    adapter=adapter,
                    sampling=msgspec.structs.replace(sampling, seed=_seed_of_choice(sampling.seed, choice)),
                    # Stop strings require a check after each token.
                    whole=asked.whole and not sampling.stop,
                    **asked.level._asdict(),
                )
                for choice in range(asked.num_choices)
            ]
            parts = interleave([self._execution.words(request, clock, domain, logprobs) for request in requests])
            async with contextlib.aclosing(parts):
                async for choice, part in parts:
                    if kept is not None and isinstance(part, Answer):
                        assert self._collector is not None
                        self._collector.keep(kept, images, part, asked.level.tenant, sampling)
                    yield choice, part

    async def ask_head(
        self,
        images: Images,
        adapter: str,
        head: str | None = None,
        level: Level = NO_LEVEL,
    ) -> HeadResult:
        """Run one pass through a task head, with the question it was trained on.

        adapter: the name of an adapter or a domain. head: None for the domain's, or the adapter's only one.

        Raises:
            UnknownAdapter, UnknownHead: There is no such adapter or head.
            BadRequest: The number of images differs from the head's; other errors as in `generate`.
        """
        with self._requests.admit(level.tenant, "head") as clock:
            return await self._by_head(images, adapter, head, clock, uuid.uuid4().hex, level)

    async def ask_heads(
        self,
        images: Sequence[Image],
        heads: Sequence[tuple[str, str | None]],
        level: Level = NO_LEVEL,
    ) -> tuple[HeadOutcome, ...]:
        """As `ask_head`, for several pairs of an adapter and a head at once. Each counts as an active request.

        Raises:
            BadRequest: There are no pairs, or more than the server's limit of requests.
            BadImage, TooLarge, DeadlineMissed: The images cannot be read from their sources.
        """
        limit = self.config.max_requests
        if not 0 < len(heads) <= limit:
            raise BadRequest(f"{len(heads)} heads are asked; the number must be from 1 to {limit}", field="heads")
        shared = SharedImages(await self._encoder.read(images, RequestClock(self.config.request_timeout_s)))

        async def outcome(adapter: str, head: str | None) -> HeadOutcome:
            try:
                answer = await self.ask_head(shared, adapter, head, level)
            except Exception as error:
                return HeadOutcome(error=ErrorValue.of(to_vlora_error(error)))
            return HeadOutcome(answer=answer)

        return tuple(await asyncio.gather(*(outcome(*pair) for pair in heads)))

    async def embed(
        self, prompt: Prompt, images: Images, adapter: str | None, level: Level, pooling: Pooling
    ) -> tuple[HeadAnswer, Timings]:
        """The embedding of a prompt; images need no question. Raises as `generate`."""
        with self._requests.admit(level.tenant, "embeddings") as clock:
            name = None if adapter is None else (await self.adapters.resolve(adapter)).adapter
            clock.adapter = name or BASE
            if is_empty(prompt) and not images:
                raise BadRequest("the input is empty; send a text or a picture", field="prompt")
            check_text(prompt, SamplingParams(), self.config)
            prompt_ids, vision, _ = await self._encoder.encode(prompt, images, clock)
            own: dict[str, Any] = {"prompt_ids": prompt_ids, "vision": vision, "pooling": pooling, **level._asdict()}
            request = Request(request_id=uuid.uuid4().hex, adapter=name, **own)
            return await self._execution.in_one_pass(request, clock)

    async def tokenize(self, prompt: Prompt, images: Images, tenant: str | None) -> tuple[int, ...]:
        """The token ids of a prompt, with those of its images."""
        with self._requests.admit(tenant, "tokenize") as clock:
            clock.adapter = BASE
            check_text(prompt, SamplingParams(), self.config)
            return (await self._encoder.encode(prompt, images, clock)).prompt_ids

    # -- the engine's state -------------------------------------------------------------------------------------------

    @property
    def engine_starting(self) -> bool:
        """Whether no engine is ready but one is starting."""
        return self._supervisor is not None and self._supervisor.starting

    @property
    def engine_ready(self) -> bool:
        return self._supervisor is None or self._supervisor.cause is None

    def engine_changed(self) -> None:
        """Discard cached adapters and start waiting frames: the engine was replaced, or no replacement will start."""
        self.adapters.invalidate()
        self.streams.resume()

    async def stats(self) -> EngineStats:
        """The engine's stats, with the model's name in place of its folder."""
        return self._with_model_name(await self.engine.stats())

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        """The engine's snapshot, with the steps after number `since` and the model's name as in `stats`."""
        snapshot = await self.engine.snapshot(since)
        return msgspec.structs.replace(snapshot, stats=self._with_model_name(snapshot.stats))

    async def read_metrics(self) -> bytes:
        """All metrics in Prometheus text format, also when the engine is dead."""
        try:
            stats, adapters = await self.stats(), await self.adapters.list()
        except EngineDead:
            return self.metrics.render(None)
        return self.metrics.render(stats, adapters)

    # -- shutdown -----------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Requests in progress; each choice counts."""
        return len(self._requests)

    @property
    def draining(self) -> bool:
        return self._requests.draining

    async def drain(self) -> None:
        """Refuse new requests and wait up to `drain_s` seconds for active ones to end. Cameras end before."""
        if self.cameras is not None:
            await self.cameras.close()
        await self._requests.drain()

    async def close(self) -> None:
        if self.cameras is not None:
            await self.cameras.close()
        self.streams.close()
        if self.learning is not None:
            await self.learning.close()
        if self.received is not None:
            self.received.close()
        await self.adapters.close()
        await self._encoder.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _by_head(
        self,
        images: Images,
        name: str,
        head: str | None,
        clock: RequestClock,
        request_id: str,
        level: Level,
    ) -> HeadResult:
        """As `Execution.head`, by the adapter that a name stands for, or by the one to which the domain moves."""
        before: str | None = None
        error: VLoraError | None = None
        while True:
            target = await self.adapters.resolve(name)
            if before == target.adapter:
                assert error is not None
                raise error
            clock.adapter = before = target.adapter
            summary = self.adapters.head_of(target, head)
            try:
                return await self._execution.head(images, target.adapter, summary, clock, request_id, level)
            except (UnknownAdapter, UnknownHead) as caught:
                error = caught
                self.adapters.invalidate()

    async def _encode(
        self, prompt: Prompt, images: Images, target: Target | None, clock: RequestClock
    ) -> EncodedPrompt:
        """Encode the prompt; images without text get the question of the domain, or the adapter's if it has one."""
        questions: set[str] = set()
        if images and target is not None and not has_question(prompt):
            questions = target.questions
            if len(questions) == 1:
                prompt = with_question(prompt, *questions)
        empty = is_empty(prompt)
        if empty and not images:
            raise BadRequest("the prompt is empty; send a text", field="prompt")
        encoded = await self._encoder.encode(prompt, images, clock)
        if empty:  # checked late, so that image errors are reported first
            raise missing_question(None if target is None else target.adapter, questions)
        return encoded

    def _with_model_name(self, stats: EngineStats) -> EngineStats:
        trainings = tuple(msgspec.structs.replace(one, losses=()) for one in stats.trainings)
        return msgspec.structs.replace(stats, model=self._model, trainings=trainings)


def choice_id(request_id: str, choice: int) -> str:
    return request_id if choice == 0 else f"{request_id}-{choice}"


def _seed_of_choice(seed: int | None, choice: int) -> int | None:
    """The seed of a choice. Without a seed every request samples from its own id."""
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=7).digest())
