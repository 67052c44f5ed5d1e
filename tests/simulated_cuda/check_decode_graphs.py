"""Decode steps as CUDA graphs on the simulated device: the same answers as steps without graphs, and nothing captured
that changes from step to step.

Run by `test_oracle.py` in a process of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.moves import shuffle
from tests.families import build_model
from tests.harness import FixedModes
from tests.simulated_cuda import Kind, counting
from tests.simulated_cuda.capture import Operation
from tests.simulated_cuda.counts import HOST_WAITS
from vlora.bench.dummy import language_shapes, write_adapter
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models.gpu.graphs import StepGraphs, sizes_up_to
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import Batch, BatchItem, Mode, Request, RequestOutput, SamplingParams

MAX_BATCH = 5
SIZES = [1, 2, 4, 5]
RANKS = {"a0": 4, "a1": 16, "a2": 33, "a3": 64, "narrow": 8, "high": 72}
"""Adapters by rank. `narrow` has factors for two kinds of layers only; no graph serves the rank of `high`."""
NUM_REQUESTS = 90


class RandomModes:
    """A policy that selects a mode at random, with requests in random order. The same seed gives the same decisions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, ready: Any, state: PolicyState) -> Decision:
        candidates: list[Candidate] = sorted(ready, key=lambda each: each.request_id)
        self._random.shuffle(candidates)
        chosen = candidates[: self._random.randint(1, state.max_batch_size)]
        merged = self._random.choice([None, *sorted({each.adapter for each in chosen if each.adapter is not None})])
        mode = Mode.UNMERGED if merged is None else Mode.MIXED
        if merged is not None and self._random.random() < 0.4:
            mode, chosen = Mode.MERGED, [each for each in chosen if each.adapter == merged]
        return Decision(mode, merged, tuple(each.request_id for each in chosen))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    shapes = language_shapes(build_model("qwen2_vl", torch.float32))
    few = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "down_proj"))}
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, few if name == "narrow" else shapes, rank, seed=rank)
        for name, rank in RANKS.items()
    }


def make_engine(adapters: dict[str, str], **settings: Any) -> Engine:
    """An engine with room for about three adapters and half of its requests. All free memory is NaN."""
    options = {"arena_bytes": 72 * PAGE_BYTES, "max_batch_size": MAX_BATCH, **settings}
    config = EngineConfig(
        model="qwen2_vl", device="cuda", dtype="float32", block_size=8, merge_fidelity_floor=0.0, **options
    )
    model = build_model("qwen2_vl", torch.float32).to("cuda")
    engine = Engine(config, model=model, executor=Inline())
    engine.parts.device.arena.bytes.fill_(255)
    engine.register_adapters(adapters)
    return engine


def requests() -> list[Request]:
    """Requests of all kinds: greedy and sampled, with penalties and log probabilities, some with a common prefix."""
    draws = random.Random(7)
    made = []
    for index in range(NUM_REQUESTS):
        start = tuple(range(3, 3 + 16 * draws.randint(0, 2)))
        prompt = (*start, *(draws.randint(3, 150) for _ in range(draws.randint(1, 20))))
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 30),
            ignore_eos=True,
            seed=index,
            temperature=draws.choice((0.0, 0.0, 0.8)),
            top_k=draws.choice((0, 20)),
            frequency_penalty=draws.choice((0.0, 0.0, 0.5)),
            logprobs=draws.choice((None, None, 2)),
        )
        adapter = draws.choice((None, *RANKS))
        made.append(Request(request_id=f"r{index:03}", prompt_ids=prompt, adapter=adapter, sampling=sampling))
    return made


@dataclasses.dataclass
class Served:
    """tokens: of each request. scores: its log probabilities. replays: by merged adapter, lanes and size."""

    tokens: dict[str, list[int]]
    scores: dict[str, list[float]]
    replays: Counter[tuple[bool, bool, int]]
    eager_decodes: int
    num_moved: int
    stats: Any


def serve(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Run all requests, a few at a time, with blocks and adapters moved between steps."""
    engine.parts.scheduler.policy = RandomModes(seed=1)
    draws = random.Random(3)
    replays: Counter[tuple[bool, bool, int]] = Counter()
    eager = 0
    replay = StepGraphs.replay

    def counted(graphs: StepGraphs, packed: Any, lanes: Any, *others: Any) -> bool:
        nonlocal eager
        done = replay(graphs, packed, lanes, *others)
        if done:
            merged = engine.parts.device.switcher.merged_key is not None
            replays[merged, bool(lanes), packed.num_tokens] += 1
        elif all(row.stop - row.start == 1 for row in packed.rows):
            eager += 1
        return done

    waiting, outputs, num_moved = requests(), dict[str, list[RequestOutput]](), 0
    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "replay", counted)
        while waiting or engine.has_work:
            while waiting and draws.random() < 0.6:
                engine.add(waiting.pop(0))
            if draws.random() < 0.2:
                num_moved += shuffle(engine, draws)
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
    tokens = {name: [token for part in parts for token in part.token_ids] for name, parts in outputs.items()}
    scores = {name: [score.logprob for part in parts for score in part.scores or ()] for name, parts in outputs.items()}
    assert not [parts for parts in outputs.values() if parts[-1].finish_reason != "length"]
    return Served(tokens, scores, replays, eager, num_moved, engine.stats())


@pytest.fixture(scope="module")
def served(adapters: dict[str, str]) -> Iterator[tuple[Engine, Served]]:
    """An engine with graphs, and what it has answered."""
    engine = make_engine(adapters)
    with pytest.MonkeyPatch.context() as patch:
        yield engine, serve(engine, patch)


def test_graphs_give_the_answers_of_steps_without_graphs(
    served: tuple[Engine, Served], adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, with_graphs = served
    without = serve(make_engine(adapters, cuda_graphs=False), monkeypatch)
    assert not without.replays
    assert with_graphs.tokens == without.tokens and len(without.tokens) == NUM_REQUESTS
    for name, scores in without.scores.items():
        assert with_graphs.scores[name] == pytest.approx(scores, abs=1e-4)


def test_the_workload_uses_every_graph_and_every_way_to_run(served: tuple[Engine, Served]) -> None:
    """The positive control of the comparison."""
    _, found = served
    decodes = Counter({key: number for key, number in found.replays.items() if key[2] <= MAX_BATCH})
    print(found.replays, found.eager_decodes, found.num_moved, found.stats)
    assert decodes.total() >= 200
    kinds = {(merged, lanes) for merged, lanes, _ in decodes}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert {number for _, _, number in decodes} == set(range(1, MAX_BATCH + 1))
    assert found.eager_decodes > 0, "no step had an adapter that graphs do not serve"
    assert found.num_moved > 100 and found.stats.num_preemptions > 0
    assert found.stats.num_adapter_loads > len(RANKS) and found.stats.num_reused_tokens > 0


def operations(engine: Engine, size: int, *, lanes: bool) -> list[Operation]:
    """The content of a graph of a size that is captured now."""
    graphs = engine.parts.device.runner.graphs
    assert graphs is not None
    graphs.steps[size].clear()  # the simulation computes what it captures, so ids must be valid
    graph: Any = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        graphs.steps[size].compute(lanes=lanes)
    return graph.operations


def decode(engine: Engine, prompts: list[int], adapters: list[str | None]) -> None:
    """Decode steps of requests with prompts of these lengths, which have cached no blocks."""
    engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED, None)
    for length, adapter in zip(prompts, adapters, strict=True):
        name, sampling = f"readiness {len(prompts)} {length}", SamplingParams(max_tokens=8, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_ids=(5,) * length, adapter=adapter, sampling=sampling))
    with counting() as counts:
        while engine.has_work:
            engine.step()
    assert counts.names(Kind.LAUNCH)["graph"] > 0


def differences(engine: Engine) -> list[tuple[Operation | None, ...]]:
    """Operations that differ between captures after two batches of one size: other contexts, adapters and lanes."""
    found: list[tuple[Operation | None, ...]] = []
    for lanes in (False, True):
        captured = []
        for prompts, adapters in (([3, 30, 9], ["a0", "a0", None]), ([41, 2, 17, 25], ["a1", "a2", "a1", "a0"])):
            decode(engine, prompts, list(adapters) if lanes else [None] * len(prompts))
            captured.append(operations(engine, 4, lanes=lanes))
        assert len(captured[0]) > 100
        found += [pair for pair in itertools.zip_longest(*captured) if pair[0] != pair[1]]
    return found


def test_batches_of_one_size_differ_in_the_content_of_buffers_only(adapters: dict[str, str]) -> None:
    """Operators and kernels, their order, addresses, shapes and numbers are the same."""
    assert differences(make_engine(adapters, arena_bytes=2048 * PAGE_BYTES)) == []


@pytest.mark.parametrize("control", ["number", "shape", "address"])
def test_arguments_that_depend_on_a_batch_are_found(
    adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    """The negative control."""
    engine = make_engine(adapters, arena_bytes=2048 * PAGE_BYTES)
    forward, calls = AdaptedLinear.forward, itertools.count()

    def changing(layer: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        y = forward(layer, x)
        if not layer.site.name.endswith("layers.0.mlp.down_proj"):
            return y
        length = next(calls) % 50 + 1
        if control == "number":
            return y + 1e-9 * length
        if control == "shape":
            return y + y.new_zeros(length).sum()
        if not torch.cuda.is_current_stream_capturing():
            kept.append(torch.zeros((), device="cuda"))
        return y + kept[-1]

    kept = [torch.zeros((), device="cuda")]
    monkeypatch.setattr(AdaptedLinear, "forward", changing)
    assert differences(engine)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: float(x.sum()),
        lambda x: torch.zeros(1).to(x.device),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_step_that_cannot_be_captured_runs_without_graphs(
    adapters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[torch.Tensor], object],
) -> None:
    forward = AdaptedLinear.forward

    def waiting(layer: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        call(x)
        return forward(layer, x)

    with monkeypatch.context() as patch:
        patch.setattr(AdaptedLinear, "forward", waiting)
        engine = make_engine({})
    assert "steps run without CUDA graphs, because the capture failed" in caplog.text
    assert engine.parts.device.runner.graphs is None
    assert answer(engine) == answer(make_engine({}, cuda_graphs=False)) == answer(make_engine({}))


def answer(engine: Engine, name: str = "r", adapter: str | None = None) -> list[int]:
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_ids=(3, 4, 5), adapter=adapter, sampling=sampling))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return [token for output in outputs for token in output.token_ids]


LENGTHS = {"x": 5, "y": 9, "z": 3}  # of prompts


def run_steps(engine: Engine, *, ahead: bool) -> list[dict[str, int]]:
    """The tokens of each step of three requests, of which one pauses: prompts, then single tokens in rows that change.

    ahead: a step is launched before the host has the tokens of the last one.
    """
    runner = engine.parts.device.runner
    for index, (name, length) in enumerate(LENGTHS.items()):
        sampling = SamplingParams(max_tokens=9, temperature=0.9 * index, seed=index)
        runner.add(Request(request_id=name, prompt_ids=tuple(range(3, 3 + length)), sampling=sampling), None)
    tables = {name: (2 * place, 2 * place + 1) for place, name in enumerate(LENGTHS)}
    start, num_tokens = dict.fromkeys(LENGTHS, 0), dict(LENGTHS)
    tokens: list[dict[str, int]] = []
    last = None
    for names in ("xyz", "xyz", "zx", "zyx", "y", "xy", "yx"):
        items = [BatchItem(name, None, start[name], num_tokens[name], tables[name], True) for name in names]
        start |= {name: start[name] + num_tokens[name] for name in names}
        num_tokens |= dict.fromkeys(names, 1)
        with counting() as counts:
            step = runner.launch(Batch(Mode.UNMERGED, None, tuple(items)))
        assert counts.total(*HOST_WAITS) == 0, counts.report(*HOST_WAITS)
        assert counts.total(Kind.H2D_ASYNC) <= 1 + (last is None), counts.report(Kind.H2D_ASYNC)  # prompts have two
        if last is not None:
            tokens.append(runner.collect(last).tokens)
        last = step
        if not ahead:
            tokens.append(runner.collect(step).tokens)
            last = None
    return tokens + ([] if last is None else [runner.collect(last).tokens])


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_step_ahead_of_the_host_reads_the_tokens_on_the_device(cuda_graphs: bool) -> None:
    wanted = run_steps(make_engine({}, cuda_graphs=False), ahead=False)
    assert run_steps(make_engine({}, cuda_graphs=cuda_graphs), ahead=True) == wanted
    assert len({token for step in wanted for token in step.values()}) > 3


def test_adapters_without_a_graph_are_logged_once(adapters: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(adapters)
    engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED, None)
    caplog.set_level(logging.WARNING)
    for name in ("r0", "r1"):
        answer(engine, name, "high")
    words = [record.message for record in caplog.records if "without CUDA graphs" in record.message]
    assert len(words) == 1 and "rank 72" in words[0]


def test_sizes_are_fine_for_small_batches_and_multiples_of_eight_for_large_ones() -> None:
    assert sizes_up_to(1) == [1] and sizes_up_to(5) == SIZES
    assert sizes_up_to(32) == [1, 2, 4, 8, 12, 16, 24, 32]
    assert sizes_up_to(60)[-3:] == [48, 56, 60]
