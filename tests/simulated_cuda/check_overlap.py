"""Steps that are launched before the last one is collected give the answers of single requests on a CPU.

Run by `test_oracle.py` in a process of its own. Random schedules: arrivals, ends of sequences, cancellations, adapters
that are loaded, unloaded and drained, deadlines, preemptions, and steps that fail when they are launched or collected.
Allocated KV blocks are filled with NaN, and a block that a launched step writes must not be freed.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig

from tests.simulated_cuda import Kind, counting
from tests.simulated_cuda.models import qwen2_vl
from vlora.bench.dummy import dummy_picture, language_shapes, write_adapter
from vlora.config import EngineConfig
from vlora.engine.engine import Engine
from vlora.errors import StepFailed
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.block_manager import WrittenBlocks
from vlora.memory.host_to_device import Inline
from vlora.models.loading import dummy_model
from vlora.orchestrator.admission.kv_admission import AnswerLengths
from vlora.simulator.machine import Clock
from vlora.types import Batch, Request, RequestOutput, SamplingParams

BLOCK_SIZE = 8
VOCAB = 48
IMAGE = VOCAB - 3
ADAPTERS = ("a0", "a1", "a2")


def config() -> Qwen2VLConfig:
    """A new one for each model, as building a model changes it."""
    return qwen2_vl(VOCAB, 32, 2, heads=2, mrope=(2, 3, 3))


def build_engine(device: str, root: Path, clock: Clock, num_pages: int = 512) -> Engine:
    """An engine with the adapters; the same weights on every device."""
    model = dummy_model(config(), "float32", torch.device(device), 0)
    shapes = language_shapes(model)
    settings = EngineConfig(
        model="dummy",
        device=device,
        load_format="dummy",
        dtype="float32",
        max_batch_size=6,
        max_step_tokens=24,
        block_size=BLOCK_SIZE,
        arena_bytes=num_pages * PAGE_BYTES,
        merge_fidelity_floor=0.0,
    )
    engine = Engine(settings, model=model, executor=Inline(), clock=clock)
    for seed, name in enumerate(ADAPTERS):
        if not (root / name).exists():
            write_adapter(root / name, shapes, 4, seed=seed)
        engine.load_adapter(name, str(root / name))
    return engine


def written_by(batch: Batch) -> set[int]:
    """The KV blocks that a step writes."""
    return {
        block
        for item in batch.items
        for block in item.block_table[item.start // BLOCK_SIZE : -(-(item.start + item.num_tokens) // BLOCK_SIZE)]
    }


class Watched:
    """An engine on the simulated device, with its launched steps and its KV blocks under control.

    Attributes:
        fail: Whether the next step fails when it is launched or collected.
        failed: Requests of steps that have failed.
        events: "launch" and "collect" with the number of the step, in order.
        num_ahead: Steps that were launched while another was in flight.
    """

    def __init__(self, root: Path, num_pages: int) -> None:
        self.clock = Clock()
        self.engine = engine = build_engine("cuda", root, self.clock, num_pages)
        self.fail = {"launch": False, "collect": False}
        self.failed: set[str] = set()
        self.events: list[tuple[str, int]] = []
        self._in_flight: dict[int, tuple[int, Batch, set[int]]] = {}  # by launched step: number, batch, written blocks
        self._num_launched = self.num_ahead = 0
        device = engine.parts.device
        runner, allocator = device.runner, engine.parts.block_manager.allocator
        launch, collect = runner.launch, runner.collect
        allocate_block, free_block, move_block = allocator.allocate_block, allocator.free_block, allocator.move_block
        kv_dim = device.hf_model.kv_dim
        kv = device.arena.kv_matrix(torch.float32, kv_dim)
        block_rows = device.limits.block_pages * PAGE_BYTES // (kv_dim * 4)

        def launching(batch: Batch) -> Any:
            assert len(self._in_flight) <= 1, "two steps are in flight"
            if self._fails("launch", batch):
                raise StepFailed("launched in vain")
            self.num_ahead += bool(self._in_flight)
            step = launch(batch)
            self._num_launched += 1
            self._in_flight[id(step)] = self._num_launched, batch, written_by(batch)
            self.events.append(("launch", self._num_launched))
            return step

        def collecting(step: Any) -> Any:
            number, batch, _ = self._in_flight.pop(id(step))
            self.events.append(("collect", number))
            result = collect(step)
            if self._fails("collect", batch):
                raise StepFailed("collected in vain")
            return result

        def freeing(block: int) -> None:
            written = set[int]().union(*(blocks for _, _, blocks in self._in_flight.values()))
            assert block not in written, "freed while a launched step writes it"
            free_block(block)

        def allocating() -> int | None:
            block = allocate_block()
            if block is not None:
                kv[block * block_rows : (block + 1) * block_rows] = torch.nan
            return block

        def moving(block: int, target: int) -> None:
            for _, _, written in self._in_flight.values():
                written.discard(block)  # the copy follows the step on its stream
            move_block(block, target)

        runner.launch, runner.collect = launching, collecting  # type: ignore[method-assign]
        allocator.allocate_block = allocating  # type: ignore[method-assign]
        allocator.free_block, allocator.move_block = freeing, moving  # type: ignore[method-assign]

    def step(self) -> tuple[RequestOutput, ...]:
        outputs = self.engine.step()
        self.engine.check_integrity()
        self.engine.parts.scheduler.check_integrity()
        return outputs

    def _fails(self, place: str, batch: Batch) -> bool:
        fails, self.fail[place] = self.fail[place], False
        if fails:
            self.failed.update(item.request_id for item in batch.items)
        return fails


@dataclasses.dataclass
class Answer:
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.reason is None, "an output after the last one"
        self.tokens += output.token_ids
        self.reason = output.finish_reason


def answers_of(engine: Engine) -> dict[str, Answer]:
    """Run an engine to the end."""
    answers: dict[str, Answer] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, Answer()).add(output)
    return answers


def alone(engine: Engine, request: Request) -> Answer:
    """The answer of one request without others, and without its deadline."""
    sampling = request.sampling
    engine.add(Request(request_id="alone", prompt_ids=request.prompt_ids, adapter=request.adapter, sampling=sampling))
    return answers_of(engine)["alone"]


def random_request(draws: random.Random, name: str) -> Request:
    greedy = draws.random() < 0.3
    return Request(
        request_id=name,
        prompt_ids=tuple(draws.randrange(2, VOCAB - 4) for _ in range(draws.choice([1, 3, 8, 17, 28]))),
        adapter=draws.choice([None, *ADAPTERS]),
        max_latency_s=draws.choice([None] * 5 + [4.0]),
        sampling=SamplingParams(
            max_tokens=draws.choice([1, 2, 5, 12, 20]),
            ignore_eos=draws.random() < 0.3,
            temperature=0.0 if greedy else 1.5,
            top_k=draws.choice([0, 12]),
            seed=draws.randrange(100),
            logprobs=draws.choice([None] * 19 + [2]),
            presence_penalty=draws.choice([0.0] * 19 + [1.0]),
        ),
    )


def decoding(num_tokens: int, **sampling: Any) -> Request:
    return Request(
        request_id="r",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def reference(root: Path) -> Engine:
    return build_engine("cpu", root, Clock())


@pytest.fixture(params=[12, 512], ids=["few pages", "many pages"])
def watched(root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """With few pages, requests enter as if each answer ended with its next token, so that some are preempted."""
    if request.param == 12:
        monkeypatch.setattr(AnswerLengths, "expected", lambda lengths, num_tokens, max_tokens: num_tokens + 1)
    return Watched(root, request.param)


@pytest.fixture
def roomy(root: Path) -> Watched:
    return Watched(root, 512)


# -- random schedules -------------------------------------------------------------------------------------------------


def run_schedule(watched: Watched, reference: Engine, root: Path, seed: int) -> Counter[str]:
    """Run a random schedule, and compare all answers. Returns how often requests ended in each way."""
    draws, engine = random.Random(seed), watched.engine
    left = [random_request(draws, f"{seed}-{index}") for index in range(draws.randrange(3, 12))]
    requests = {request.request_id: request for request in left}
    answers = {name: Answer() for name in requests}
    stopped: set[str] = set()  # cancelled, or of an unloaded adapter
    watched.failed.clear()

    def deliver(outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            answers[output.request_id].add(output)

    while left or engine.has_work:
        watched.clock.now += 0.1
        while left and draws.random() < 0.5:
            engine.add(left.pop())
        alive = [name for name, answer in answers.items() if answer.tokens and answer.reason is None]
        if alive and draws.random() < 0.04:
            name = draws.choice(alive)
            stopped.add(name)
            output = engine.cancel(name)
            assert output is not None
            deliver([output])
        if draws.random() < 0.04:
            adapter = draws.choice(ADAPTERS)
            outputs = engine.unload_adapter(adapter, drain=draws.random() < 0.5)
            stopped.update(output.request_id for output in outputs)
            deliver(outputs)
            engine.load_adapter(adapter, str(root / adapter))
        for place in watched.fail:
            watched.fail[place] = draws.random() < 0.01
        deliver(watched.step())
    watched.fail = dict.fromkeys(watched.fail, False)
    for name, request in requests.items():
        want, got = alone(reference, request), answers[name]
        assert got.tokens == want.tokens[: len(got.tokens)]
        if got.reason in ("cancelled", "error"):
            assert name in stopped or name in watched.failed or request.max_latency_s is not None
        else:
            assert got == want
    assert not engine.parts.block_manager.holders and not engine.has_work
    return Counter(str(answer.reason) for answer in answers.values())


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_schedules_give_the_answers_of_single_requests(
    watched: Watched, reference: Engine, root: Path, seeds: range, request: pytest.FixtureRequest
) -> None:
    reasons: Counter[str] = Counter()
    for seed in seeds:
        reasons += run_schedule(watched, reference, root, seed)
    num_preemptions = watched.engine.stats().num_preemptions
    print(f"{dict(reasons)}, {watched.num_ahead} steps ahead, {num_preemptions} preemptions")
    assert watched.num_ahead > len(seeds)
    if "many pages" in request.node.name:
        assert num_preemptions == 0
    if len(seeds) > 10:
        assert num_preemptions or "many pages" in request.node.name
        assert min(reasons[reason] for reason in ("stop", "length", "cancelled", "error")) > 0


def test_blocks_that_are_freed_at_once_are_found(
    roomy: Watched, reference: Engine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(WrittenBlocks, "keep_written", lambda *_: None)
    with pytest.raises(AssertionError, match="freed while a launched step writes it"):
        for seed in range(60):
            run_schedule(roomy, reference, root, seed)


# -- single steps -----------------------------------------------------------------------------------------------------


def test_a_step_is_launched_before_the_last_one_is_collected(roomy: Watched) -> None:
    roomy.engine.add(decoding(5))
    assert answers_of(roomy.engine)["r"].reason == "length"
    ahead = [event for number in range(2, 6) for event in (("launch", number), ("collect", number - 1))]
    assert roomy.events == [("launch", 1), *ahead, ("collect", 5)], "the limit of tokens needs no discarded step"


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}])
def test_steps_that_need_the_last_token_run_in_order(roomy: Watched, sampling: dict[str, float]) -> None:
    roomy.engine.add(decoding(5, **sampling))
    answers_of(roomy.engine)
    assert roomy.events == [(event, number) for number in range(1, 6) for event in ("launch", "collect")]


def test_an_ended_request_keeps_its_blocks_and_frees_its_id(roomy: Watched, reference: Engine) -> None:
    """Blocks until its last step is collected, the id at once."""
    engine, blocks, again = roomy.engine, roomy.engine.parts.block_manager, decoding(6, temperature=1.0, seed=3)
    engine.add(decoding(50))
    while roomy.num_ahead < 3:
        roomy.step()
    held = blocks.num_taken_blocks
    assert engine.cancel("r") is not None
    assert blocks.num_taken_blocks == held and not blocks.holders and engine.has_work
    engine.add(again)
    assert answers_of(engine)["r"] == alone(reference, again)
    assert blocks.num_taken_blocks == 0


def test_encoding_images_waits_for_the_end_of_the_step_only(roomy: Watched) -> None:
    picture = dummy_picture(config(), 4)
    engine = roomy.engine
    engine.add(Request(request_id="r", prompt_ids=(*[IMAGE] * picture.num_tokens, 5), vision=(picture,)))
    with counting() as counts:
        engine.step()
    assert engine.stats().num_encoded_patches > 0
    assert counts.total(Kind.SYNCHRONIZE) == 1, counts.report(Kind.SYNCHRONIZE)
