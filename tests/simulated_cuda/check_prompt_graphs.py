"""Steps with prompt tokens as CUDA graphs between which attention is launched, on the simulated device.

Run by `test_oracle.py` in a process of its own. Random batches of all kinds of requests give the results of steps
without graphs, although everything that a step does not write is NaN. A step is one launch for each piece, one copy for
each of its two buffers, and no synchronization.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads import HeadSpec, TaskHead, save_heads
from tests.harness import FixedModes
from tests.simulated_cuda import Kind, counting
from tests.simulated_cuda.check_overlap import IMAGE, VOCAB, config
from tests.simulated_cuda.check_steps import MIXED, UNMERGED, Served
from tests.simulated_cuda.counts import HOST_WAITS
from tests.simulated_cuda.install import uncomputed_kernels
from vlora.bench.dummy import dummy_picture, language_shapes, write_adapter
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models.gpu.graphs import Pieces, StepGraphs, buckets_up_to
from vlora.models.loading import dummy_model
from vlora.types import Batch, BatchItem, Mode, Request, SamplingParams, StepResult, VisionInput

RANKS = {"a0": 4, "a1": 16, "a2": 33}
BLOCK = 8
BLOCKS = 16  # of a request
MOST = 5  # requests at a time


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters with a head over the last token, and one over the tokens of an image."""
    folder, shapes = (
        tmp_path_factory.mktemp("adapters"),
        language_shapes(dummy_model(config(), "float32", torch.device("cpu"), 0)),
    )
    found = {}
    for name, rank in RANKS.items():
        found[name] = write_adapter(folder / name, shapes, rank, seed=rank)
        heads = {}
        for task in ("classification", "detection"):
            spec = HeadSpec(name=task, task=task, prompt="what ?", num_frames=1, hidden_size=32, labels=("x", "y", "z"))
            generator = torch.Generator().manual_seed(rank)
            count = spec.make_task().num_outputs
            heads[task] = TaskHead(spec, torch.randn(count, 32, generator=generator), torch.zeros(count), None)
        save_heads(found[name], heads)
    return found


def make_engine(adapters: dict[str, str], **settings: Any) -> Engine:
    options = EngineConfig(
        model="dummy",
        device="cuda",
        load_format="dummy",
        dtype="float32",
        max_batch_size=MOST + 1,
        max_step_tokens=200,
        block_size=BLOCK,
        arena_bytes=1024 * PAGE_BYTES,
        merge_fidelity_floor=0.0,
        **settings,
    )
    model = dummy_model(config(), "float32", torch.device("cuda"), 0)
    engine = Engine(options, model=model, executor=Inline())
    engine.parts.device.arena.bytes.fill_(255)  # NaN
    for name, path in adapters.items():
        engine.load_adapter(name, path)
        engine.add(Request(request_id=name, prompt_ids=(5,), adapter=name, sampling=SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    return engine


class Cursor:
    """Allows another third of the tokens at each place of an answer."""

    def __init__(self) -> None:
        self._number = 0

    def allowed(self) -> np.ndarray:
        return np.arange(VOCAB) % 3 == self._number % 3

    def advance(self, token: int) -> None:
        assert token % 3 == self._number % 3
        self._number += 1


@dataclasses.dataclass
class Asked:
    request: Request
    block_table: tuple[int, ...]
    num_known: int
    computed: int = 0


class Batches:
    """Random batches of requests in any state, run on several engines."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        self._engines, self._draws = engines, random.Random(seed)
        self._keys = sorted(engines[0].parts.device.pool.resident)
        self._asked: dict[str, Asked] = {}
        last = engines[0].parts.device.limits.num_pages  # adapters have the first pages; a block is one
        self._free = [tuple(range(last - BLOCKS * (place + 1), last - BLOCKS * place)) for place in range(MOST)]
        self._number = 0
        self.kinds: Counter[str] = Counter()

    def step(self) -> list[StepResult]:
        """Run one batch. Returns the result of each engine."""
        draws = self._draws
        while self._free and draws.random() < 0.6:
            self._ask()
        if not self._asked:
            self._ask()
        chosen = draws.sample(sorted(self._asked), draws.randint(1, len(self._asked)))
        mode, merged = Mode.UNMERGED, None
        if draws.random() < 0.5:
            mode, merged = Mode.MIXED, draws.choice(self._keys)
            same = [name for name in chosen if self._asked[name].request.adapter == merged]
            if same and draws.random() < 0.6:
                mode, chosen = Mode.MERGED, same
        elif draws.random() < 0.5:
            chosen = [name for name in chosen if self._asked[name].request.adapter is None] or chosen
        self.kinds[mode] += 1
        items = []
        for name in chosen:
            asked = self._asked[name]
            left = asked.num_known - asked.computed
            number = left if draws.random() < 0.7 else draws.randint(1, left)
            items.append(
                BatchItem(name, asked.request.adapter, asked.computed, number, asked.block_table, number == left)
            )
            asked.computed += number
        results = []
        for engine in self._engines:
            runner = engine.parts.device.runner
            if runner.graphs is not None:
                buffers = runner.graphs.buffers
                for each in (buffers.embeddings, buffers.hidden, buffers.q, buffers.out, *buffers.new):
                    each.fill_(torch.nan)
            results.append(runner.run(Batch(mode, merged, tuple(items))))
        for item in items:
            asked = self._asked[item.request_id]
            if item.request_id in results[0].tokens:
                asked.num_known += 1
            full = asked.num_known >= len(asked.request.prompt_ids) + asked.request.sampling.max_tokens
            if (item.answers and (asked.request.in_one_pass or full)) or item.request_id in results[0].errors:
                for engine in self._engines:
                    engine.parts.device.runner.release(item.request_id)
                self._free.append(self._asked.pop(item.request_id).block_table)
        return results

    def _ask(self) -> None:
        draws, name = self._draws, f"r{self._number}"
        self._number += 1
        length = draws.choice((1, 2, 7, 20, 50, 90))
        prompt = [draws.randrange(2, VOCAB - 4) for _ in range(length)]
        vision: tuple[VisionInput, ...] = ()
        if draws.random() < 0.3:
            picture = dummy_picture(config(), 4)
            vision, prompt = (picture,), [*prompt[: length // 2], *[IMAGE] * picture.num_tokens, *prompt[length // 2 :]]
        adapter = draws.choice((None, *self._keys))
        kind = draws.choice(("text", "text", "grammar", "head", "mean"))
        head = None if kind != "head" or adapter is None else "detection" if vision else "classification"
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 12),
            ignore_eos=True,
            seed=self._number,
            temperature=draws.choice((0.0, 1.2)),
            top_k=draws.choice((0, 12)),
            logprobs=draws.choice((None, None, 2)),
            presence_penalty=draws.choice((0.0, 0.5)),
        )
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt),
            vision=vision,
            adapter=adapter,
            head=head,
            read_from=length // 2 if head == "detection" else None,
            pooling="mean" if kind == "mean" else None,
            sampling=sampling,
        )
        self.kinds[head or kind] += 1
        for engine in self._engines:
            runner = engine.parts.device.runner
            runner.add(request, None)
            if kind == "grammar":
                runner.begin_grammar(name, Cursor())  # type: ignore[arg-type]
        self._asked[name] = Asked(request, self._free.pop(), len(prompt))


def assert_same(one: StepResult, other: StepResult) -> None:
    assert not one.errors and not other.errors
    assert one.tokens == other.tokens and one.scores.keys() == other.scores.keys()
    for name, score in one.scores.items():
        assert other.scores[name].logprob == pytest.approx(score.logprob, abs=1e-4)
    assert one.heads.keys() == other.heads.keys()
    for name, answer in one.heads.items():
        found = other.heads[name]
        assert found.label == answer.label and len(found.boxes) == len(answer.boxes)
        assert (*found.scores, *found.values) == pytest.approx((*answer.scores, *answer.values), abs=1e-4)


@pytest.mark.parametrize("number", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_batches_give_the_results_of_steps_without_graphs(
    adapters: dict[str, str], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [make_engine(adapters), make_engine(adapters, cuda_graphs=False)]
    graphs = engines[0].parts.device.runner.graphs
    assert graphs is not None and not graphs.pieces, "they are captured when they are used"
    batches = Batches(engines, seed=number)
    for _ in range(number):
        assert_same(*batches.step())
    captured = [key for key, pieces in graphs.pieces.items() if pieces.is_captured]
    print(batches.kinds, captured)
    assert "without CUDA graphs" not in caplog.text
    assert len(captured) > 2
    if number == 200:
        assert {(key.merged, key.lanes) for key in captured} == set(itertools.product((False, True), repeat=2))
        assert {key.limited for key in captured} == {False, True} and len({key.num_rows for key in captured}) > 2
        assert min(batches.kinds[kind] for kind in ("text", "grammar", "classification", "detection", "mean")) > 1


def test_rows_that_are_not_written_would_be_found(adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: attention that is not launched leaves NaN."""
    engines = [make_engine(adapters), make_engine(adapters, cuda_graphs=False)]
    monkeypatch.setattr("vlora.models.gpu.fixed_step.PromptStep.launch_attention", lambda *_: None)
    batches = Batches(engines, seed=1)
    with pytest.raises(AssertionError):
        for _ in range(10):
            assert_same(*batches.step())


@pytest.mark.parametrize(("mode", "adapters"), [(UNMERGED, ("a0", "a1", None)), (MIXED, ("a0", "a1", None))])
def test_the_launches_of_a_prompt_step(
    tmp_path: Path, mode: tuple[Mode, str | None], adapters: tuple[str | None, ...]
) -> None:
    """One for each piece, those of attention, and the draw. The step stays in flight."""
    with uncomputed_kernels():
        served = Served(3, tmp_path, cuda_graphs=True)
        engine = served.engine
        engine.parts.scheduler.policy = FixedModes(*mode)
        runner = engine.parts.device.runner
        for turn in range(4):
            for index, adapter in enumerate(adapters):
                prompt = tuple(3 + (7 * place + index + turn) % 400 for place in range(40 + index))
                sampling = SamplingParams(max_tokens=1 + turn, ignore_eos=True, temperature=0.7 * (turn % 2))
                name = f"{turn} {index}"
                engine.add(Request(request_id=name, prompt_ids=prompt, adapter=adapter, sampling=sampling))
            with counting() as counts:
                engine.step()
            if turn > 1:
                assert engine.parts.steps.pending, "the step was collected at once"
                assert counts.names(Kind.LAUNCH)["graph"] == 3 + 2, "a layer's attention ends a piece"
                assert not counts.total(*HOST_WAITS), counts.report(*HOST_WAITS)
                assert counts.total(Kind.H2D_ASYNC) <= 4, counts.report(Kind.H2D_ASYNC)  # and two tables of lanes
                others = counts.total(Kind.LAUNCH) - 5
                assert others <= 3 * 3 + 2 + 15 * (turn % 2), counts.report(Kind.LAUNCH)
            while engine.has_work:
                engine.step()
        assert runner.graphs is not None and any(pieces.is_captured for pieces in runner.graphs.pieces.values())


def test_a_step_that_cannot_be_captured_runs_without_graphs(
    adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut = Pieces.cut

    def waiting(pieces: Pieces, between: Any) -> None:
        torch.cuda.synchronize()
        cut(pieces, between)

    engines = [make_engine(adapters), make_engine(adapters, cuda_graphs=False)]
    monkeypatch.setattr(Pieces, "cut", waiting)
    caplog.set_level(logging.WARNING)
    batches = Batches(engines, seed=3)
    for _ in range(12):
        assert_same(*batches.step())
    words = [record.message for record in caplog.records if "without CUDA graphs" in record.message]
    assert len(words) == 1 and "synchronization" in words[0]
    graphs = engines[0].parts.device.runner.graphs
    assert isinstance(graphs, StepGraphs) and not any(pieces.is_captured for pieces in graphs.pieces.values())


def test_buckets_have_little_padding() -> None:
    assert buckets_up_to(200) == [32, 64, 128, 160, 192, 200] and buckets_up_to(20) == [20]
    buckets = buckets_up_to(2048)
    assert buckets[-5:] == [1024, 1280, 1536, 1792, 2048] and len(buckets) == 19
    assert all(after <= before * 1.25 for before, after in itertools.pairwise(buckets[2:]))
