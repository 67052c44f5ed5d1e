"""A simulated engine: real scheduler, page bookkeeping and residency; a fake clock; a runner without a model.

The runner tracks the content of every KV slot, so it detects a context that is not where the scheduler expects it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from vlora.memory.adapter_cache import Residency
from vlora.memory.books import ArenaBooks, BlockTables
from vlora.memory.prefix_cache import PrefixCache
from vlora.orchestrator import (
    Algorithm1,
    Candidate,
    CostModel,
    Decision,
    Policy,
    PolicyState,
    Scheduler,
    StepSize,
    bring_wanted,
    give_way_to_kv,
)
from vlora.simulator.loader import Loader
from vlora.types import (
    Batch,
    BatchItem,
    Encode,
    Encoded,
    ErrorValue,
    HeadAnswer,
    MemoryView,
    Mode,
    Request,
    RequestOutput,
    SamplingParams,
    StepResult,
    VisionInput,
)

EOS = 0
VOCABULARY = 40
IMAGE = 1000  # placeholder token
SHORT_LANE = 4  # tokens
PIECE = 4  # minimum patches per encoding


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of the simulated machine. `long_lane` applies to each lane of more than `SHORT_LANE` tokens."""

    step: float = 0.01
    token: float = 0.001
    lane: float = 0.0005
    long_lane: float = 0.0
    context: float = 0.00001
    patch: float = 0.0005
    merge: float = 0.02


def token_at(request_id: str, place: int) -> int:
    """The token that the fake model samples at that position; it depends on nothing else."""
    return zlib.crc32(f"{request_id}/{place}".encode()) % VOCABULARY


def expected_tokens(request: Request) -> list[int]:
    """The expected answer of a request, independent of scheduling."""
    tokens = []
    for place in range(request.sampling.max_tokens):
        tokens.append(token_at(request.request_id, place))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            break
    return tokens


class Content:
    """The inputs of the KV of each token: the adapter, all tokens up to it, and the images they show.

    `owner`: the request id where blocks must not be shared.
    """

    def __init__(self, request: Request, owner: str | None) -> None:
        self._made_of: list[object] = [(request.adapter, owner)]
        shown = [(item.content_hash, place) for item in request.vision for place in range(item.num_tokens)]
        for token in request.prompt_ids:
            self.append(token, shown.pop(0) if token == IMAGE else None)

    def append(self, token: int, shown: object = None) -> None:
        self._made_of.append(hash((self._made_of[-1], token, shown)))

    def at(self, index: int) -> object:
        return self._made_of[index + 1]


class FakeRunner:
    """Executes batches after checking each item: KV context in place, mode correct, answer due."""

    def __init__(
        self, clock: FakeClock, speed: Speed, block_size: int, failing: Mapping[str, int], *, sharing: bool
    ) -> None:
        self.clock = clock
        self.speed = speed
        self.block_size = block_size
        self.failing = dict(failing)  # request_id -> number of the step that fails
        self.requests: dict[str, Request] = {}
        self.num_sampled: dict[str, int] = {}
        self.slots: dict[tuple[int, int], object] = {}
        self.sharing = sharing
        self.contents: dict[str, Content] = {}
        self.merged: str | None = None
        self.shadow: str | None = None  # merged last: restoring it is free, as with shadow weights
        self.num_cached = 1  # images per call that the cache keeps
        self.cached: set[str] = set()  # contents
        self.broken: set[str] = set()  # contents that fail to encode
        self.held: set[tuple[str, int]] = set()  # embeddings, by request and place
        self.calls: dict[int, tuple[tuple[tuple[str, int], ...], float]] = {}  # items and patches left
        self.num_encoded: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.num_sampled[request.request_id] = 0
        self.contents[request.request_id] = Content(request, None if self.sharing else request.request_id)

    def run(self, batch: Batch) -> StepResult:
        assert batch.items or batch.encode
        self._prove_mode(batch)
        encoded, image_errors = (None, {}) if batch.encode is None else self._encode(batch.encode)
        switched = batch.merged_adapter != self.merged
        self.merged = batch.merged_adapter
        switch_s = 0.0
        if batch.merged_adapter not in (None, self.shadow):
            self.shadow, switch_s = batch.merged_adapter, self.speed.merge
        tokens: dict[str, int] = {}
        heads: dict[str, HeadAnswer] = {}
        errors: dict[str, ErrorValue] = image_errors
        lanes = context = 0
        for item in batch.items:
            request = self.requests[item.request_id]
            known = len(request.prompt_ids) + self.num_sampled[item.request_id]
            stop = item.start + item.num_tokens
            assert item.num_tokens >= 1 and stop <= known and item.answers == (stop == known)
            content = self.contents[item.request_id]
            self._prove_images(item, request)
            for index in range(item.start):
                assert self.slots[self._slot(item.block_table, index)] == content.at(index), "KV content is lost"
            for index in range(item.start, stop):
                self.slots[self._slot(item.block_table, index)] = content.at(index)
            context += item.start
            if item.adapter != batch.merged_adapter:
                lanes += item.num_tokens * ((item.adapter is not None) + (batch.merged_adapter is not None))
            self.failing[item.request_id] = self.failing.get(item.request_id, 0) - 1
            if self.failing[item.request_id] == 0:
                # No request may read KV from a failed step.
                for index in range(item.start, stop):
                    self.slots[self._slot(item.block_table, index)] = "spoilt"
                errors[item.request_id] = ErrorValue("bad_image", "this one fails alone")
            elif item.answers and request.head is not None:
                heads[item.request_id] = HeadAnswer(
                    task="binary", label="yes", confidence=1.0, label_id=1, scores=(0.0, 1.0), labels=("no", "yes")
                )
            elif item.answers:
                tokens[item.request_id] = token_at(item.request_id, self.num_sampled[item.request_id])
                self.num_sampled[item.request_id] += 1
                content.append(tokens[item.request_id])
        speed = self.speed
        step_s = speed.step + speed.token * batch.num_tokens + speed.lane * lanes + speed.context * context
        step_s += speed.long_lane * sum(tokens > SHORT_LANE for tokens in StepSize.of(batch).lanes)
        if not batch.items:
            step_s = 0.0
        step_s += encoded.seconds if encoded else 0.0
        self.clock.now += step_s + switch_s
        return StepResult(
            tokens=tokens,
            heads=heads,
            errors=errors,
            step_s=step_s,
            switch_s=switch_s,
            switched=switched,
            encoded=encoded,
        )

    def _encode(self, encode: Encode) -> tuple[Encoded, dict[str, ErrorValue]]:
        """Encode a call's share in pieces of `PIECE` patches. The items of a call never change."""
        images = {self.image(request_id, place).content_hash: place for request_id, place in encode.items}
        if encode.number not in self.calls:
            assert not self.calls or encode.number > max(self.calls), "calls are sequential"
            total = sum(
                {
                    self.image(request_id, place).content_hash: self.image(request_id, place).num_patches
                    for request_id, place in encode.items
                    if self.image(request_id, place).content_hash not in self.cached
                }.values()
            )
            self.calls[encode.number] = (encode.items, float(total))
        items, left = self.calls[encode.number]
        assert items == encode.items
        pieces = max(1, math.ceil(encode.budget / PIECE))
        num_patches = min(left, pieces * PIECE)
        done = num_patches == left
        self.calls[encode.number] = (items, left - num_patches)
        seconds = self.speed.patch * num_patches
        requests = {request_id for request_id, _ in items}
        if done and images.keys() & self.broken:
            error = ErrorValue("bad_image", "it cannot be encoded")
            errors = {request_id: error for request_id in requests if len(requests) == 1}
            return Encoded(num_patches=num_patches, seconds=seconds, failed=True), errors
        if done:
            for request_id, place in items:
                self.held.add((request_id, place))
            self.cached.update(list(images)[: self.num_cached])
            self.num_encoded.update(images.keys())
        return Encoded(num_patches=num_patches, seconds=seconds, done=done), {}

    def image(self, request_id: str, place: int) -> VisionInput:
        return self.requests[request_id].vision[place]

    def _prove_images(self, item: BatchItem, request: Request) -> None:
        """Assert that embeddings of every image with computed tokens are held; cached ones are held from now on."""
        shown = [(place, i) for place, image in enumerate(request.vision) for i in range(image.num_tokens)]
        at = [index for index, token in enumerate(request.prompt_ids) if token == IMAGE]
        for index, (place, _) in zip(at, shown, strict=True):
            if index >= item.start:
                if request.vision[place].content_hash in self.cached:
                    self.held.add((request.request_id, place))
                assert (request.request_id, place) in self.held, f"image {place} of {request.request_id} is not encoded"

    def move_block(self, block: int, target: int) -> None:
        for offset in range(self.block_size):
            self.slots[target, offset] = self.slots.pop((block, offset), None)

    def _slot(self, table: Sequence[int], index: int) -> tuple[int, int]:
        return table[index // self.block_size], index % self.block_size

    @staticmethod
    def _prove_mode(batch: Batch) -> None:
        adapters = {item.adapter for item in batch.items}
        if not batch.items:
            return
        if batch.mode is Mode.MERGED:
            assert adapters == {batch.merged_adapter}
        elif batch.mode is Mode.MIXED:
            assert batch.merged_adapter is not None and adapters != {batch.merged_adapter}
        else:
            assert batch.merged_adapter is None and adapters != {None}


class Watched:
    """A policy that records its inputs."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.theta_s = 0.0
        self.credits: dict[str, float] = {}

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        self.theta_s = state.theta_s
        self.credits = {candidate.request_id: candidate.credit for candidate in ready}
        return self.policy.decide(ready, state)


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the log: time, policy inputs and batch. `ready`: the requests that the policy could select."""

    start_s: float
    end_s: float
    theta_s: float
    ready: tuple[str, ...]
    batch: Batch

    @property
    def num_ready(self) -> int:
        return len(self.ready)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The simulated machine.

    Attributes:
        adapters: pages by name.
        lossy: adapters that may not be merged.
        load_s: seconds to load an adapter.
    """

    num_pages: int = 256
    pages_per_block: int = 1
    block_size: int = 4
    max_adapter_pages: int = 32
    max_batch_size: int = 8
    max_step_tokens: int = 64
    theta_s: float = 0.2
    adapters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lossy: frozenset[str] = frozenset()
    load_s: float = 0.0
    speed: Speed = Speed()
    prefix_cache: bool = False
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Simulation:
    """Runs requests as the engine does: load adapters, schedule, run, record. Every step checks all invariants."""

    def __init__(
        self, machine: Machine, *, policy: Policy | None = None, failing: Mapping[str, int] | None = None
    ) -> None:
        self.machine = machine
        self.num_copied = 0  # pages
        self.clock = FakeClock()
        prefix = PrefixCache({"image": IMAGE})
        self.books = ArenaBooks(machine.num_pages, machine.pages_per_block, displaced=prefix.drop, copy=self._copy)
        self.tables = BlockTables(self.books, machine.block_size, prefix if machine.prefix_cache else None)
        self.residency = Residency(self.books, machine.max_adapter_pages)
        self.loader = Loader(self.residency, self.clock, machine.load_s)
        self.watched = Watched(policy or Algorithm1())
        self.runner = FakeRunner(
            self.clock, machine.speed, machine.block_size, failing or {}, sharing=machine.prefix_cache
        )
        self.scheduler = Scheduler(
            policy=self.watched,
            tables=self.tables,
            max_request_blocks=self.books.num_blocks - -(-machine.max_adapter_pages // machine.pages_per_block),
            max_batch_size=machine.max_batch_size,
            max_step_tokens=machine.max_step_tokens,
            theta_s=machine.theta_s,
            eos_ids=frozenset({EOS}),
            cost=CostModel(SHORT_LANE),
            clock=self.clock,
            weights=machine.weights,
            tenant_weights=machine.tenant_weights,
            placeholders={"image": IMAGE},
            is_cached=lambda key: key[0] in self.runner.cached,
        )
        self.log: list[Step] = []
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.runner.add(request)
            self.outputs[request.request_id] = []

    def cancel(self, request_id: str) -> None:
        output = self.scheduler.cancel(request_id)
        if output is not None:
            self.outputs[request_id].append(output)

    def step(self) -> Batch | None:
        self.scheduler.admit(self.loader.resident | self.loader.arriving)
        self._bring_adapters()
        resident, arriving = self.loader.resident, self.loader.arriving
        start_s = self.clock.now
        batch = self.scheduler.schedule(
            MemoryView(resident=resident, mergeable=resident - self.machine.lossy, loading=arriving)
        )
        outputs = list(self.scheduler.drain_outputs())
        self.check_integrity()
        if batch is not None:
            assert len(batch.items) <= self.machine.max_batch_size
            assert batch.num_tokens <= self.machine.max_step_tokens
            assert batch.merged_adapter is None or batch.merged_adapter in resident - self.machine.lossy
            outputs += self.scheduler.record(batch, self.runner.run(batch))
            self.check_integrity()
            assert {item.adapter for item in batch.items} <= resident | {None}
            self.log.append(Step(start_s, self.clock.now, self.watched.theta_s, tuple(self.watched.credits), batch))
        elif self.loader.next_s is not None:
            self.clock.now = self.loader.next_s
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return batch

    def run(
        self,
        arrivals: Sequence[tuple[float, Request]] = (),
        *,
        cancels: Sequence[tuple[int, str]] = (),
        max_steps: int = 5000,
    ) -> None:
        """Run until no work is left.

        Args:
            arrivals: (seconds, request), in order of time.
            cancels: (number of the step before which to cancel, request id).
            max_steps: steps after which the test fails.
        """
        waiting = list(arrivals)
        for step in range(max_steps):
            while waiting and waiting[0][0] <= self.clock.now:
                self.add(waiting.pop(0)[1])
            for when, request_id in cancels:
                if when == step:
                    self.cancel(request_id)
            if not self.scheduler.has_work:
                if not waiting:
                    return
                self.clock.now = waiting[0][0]
            else:
                self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_integrity(self) -> None:
        self.books.check_integrity()
        self.tables.check_integrity()
        self.residency.check_integrity()
        self.scheduler.check_integrity()

    def _copy(self, first_page: int, target: int, num_pages: int) -> None:
        """Move the content of a KV block with its pages; adapter content is not simulated."""
        size = self.machine.pages_per_block
        self.num_copied += num_pages
        if num_pages == size and first_page % size == target % size == 0:
            self.runner.move_block(first_page // size, target // size)

    def _bring_adapters(self) -> None:
        pages = self.machine.adapters
        self.loader.collect()
        bring_wanted(self.scheduler, self.residency, lambda name: self.loader.bring(name, pages[name]))
        give_way_to_kv(self.scheduler, self.residency, self.runner.merged)
        self.residency.drain_evicted()


def make_request(
    request_id: str,
    adapter: str | None = None,
    *,
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 4,
    head: str | None = None,
    ignore_eos: bool = True,
    max_latency_s: float | None = None,
    images: Sequence[tuple[str, int]] = (),
    max_ttft_s: float | None = None,
    priority: int = 0,
    tenant: str | None = None,
) -> Request:
    """A request with a prompt of the given length, or with the given tokens.

    `images`: (content, placeholders), in order.
    """
    return Request(
        request_id=request_id,
        prompt_ids=tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt,
        vision=tuple(
            VisionInput(kind="image", content_hash=content, num_tokens=count, num_patches=4 * count, fields={})
            for content, count in images
        ),
        adapter=adapter,
        head=head,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        max_latency_s=max_latency_s,
        max_ttft_s=max_ttft_s,
        priority=priority,
        tenant=tenant,
    )
