"""What single benches measure: cells of the operator, floors of work, fitted costs, heads, training, clusters."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from atmm import longest_short_lane, thin_batches
from atmm.tuning.search import Case, Shape
from benchmarks import atmm as operator_bench
from benchmarks import cluster
from benchmarks import training as beside
from benchmarks.arrivals import Clock, poisson
from benchmarks.gpu.prefill import prefill_flops
from benchmarks.paper import benches
from benchmarks.training import Served
from vlora.bench.costs import StepSample, fit, fit_costs, patch_cost
from vlora.bench.dummy import BenchModel, language_shapes, small_config
from vlora.bench.step import DecodeWork, FloorTimes, StepWork
from vlora.bench.timed_engine import TimedEngine
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.lora import adapted_linear
from vlora.models.loading import dummy_model
from vlora.orchestrator.cost_model import Costs, StepSize, TokenThresholds
from vlora.types import Request, RequestOutput, SamplingParams

CPU = torch.device("cpu")

# -- the operator -----------------------------------------------------------------------------------------------------

BASELINES = ("gather and bmm", "padded einsum", "plain loop", "PEFT layer")


def test_a_cell_divides_the_times_of_others_by_that_of_the_chosen_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def raced(calls: Mapping[str, object], chosen: str, turns: int) -> dict[str, float]:
        return {name: 2.0 if name == chosen else 1.0 for name in calls}

    monkeypatch.setattr(operator_bench, "race_strategies", raced)
    with torch.inference_mode():
        row, seconds = operator_bench.measure_cell(Case(Shape(48, (40,)), 8, "float32", 2, 8, False), rounds=2)
    assert (row["layer"], row["tokens"], row["adapters"], row["segments"]) == ("48x40", 8, 2, "uneven")
    assert row["chosen / best"] == 2.0 and row["chosen"] != row["best"]
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys(("chosen", *BASELINES), 2)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    assert row["us"] == pytest.approx(1e6 * median["chosen"])
    for name in BASELINES:
        assert row[name] == pytest.approx(median[name] / median["chosen"])


def test_a_slow_choice_is_timed_again_and_the_second_time_counts() -> None:
    def raced(**seconds: list[float]) -> dict[str, float]:
        endless = {name: itertools.chain(taken, itertools.repeat(taken[-1])) for name, taken in seconds.items()}
        return operator_bench.race_strategies(
            {name: functools.partial(next, each) for name, each in endless.items()}, "chosen", 3
        )

    assert raced(chosen=[2.0] * 4 + [1.0], other=[1.0], slow=[9.0]) == {"chosen": 1.0, "other": 1.0}
    worse = raced(chosen=[1.2] * 4 + [1.5], other=[1.0])
    assert worse["chosen"] / worse["other"] == 1.5
    assert raced(chosen=[1.09], other=[1.0])["chosen"] == pytest.approx(1.09)


def test_the_spread_is_over_all_cells() -> None:
    steady, uneven = [1.0] * 20, [1.0] * 18 + [2.0, 2.0]
    cells = [{"chosen": uneven, "a": steady, "b": [100 * taken for taken in steady]}]
    assert operator_bench.spread_of(cells) == {"chosen": 2.0, "others": 1.0}
    # Two of eighty calls.
    more = [*cells, *[{"chosen": steady, "a": steady}] * 3]
    assert operator_bench.spread_of(more) == {"chosen": 1.0, "others": 1.0}


# -- floors of an engine's work ---------------------------------------------------------------------------------------

CONTEXT = 64


@pytest.fixture(scope="module")
def model() -> Any:
    plain: Any = dummy_model(small_config(vision="none"), "bfloat16", CPU, seed=0)
    plain.set_attn_implementation("eager")  # products that torch counts
    return plain


@torch.no_grad()
def test_the_work_of_a_decode_step_is_that_of_torch(model: Any) -> None:
    shapes, ranks, batch = language_shapes(model), [8, 64], 3
    caches = [DynamicCache(config=model.config.text_config) for _ in range(2)]
    run: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    model(input_ids=torch.full((batch, CONTEXT - 1), 3), past_key_values=caches[0], **run)
    with FlopCounterMode(display=False) as counted:
        places = torch.full((3, batch, 1), CONTEXT - 1)
        model(input_ids=torch.full((batch, 1), 3), position_ids=places, past_key_values=caches[0], **run)
    work = DecodeWork(model, shapes, CONTEXT)
    # Of weights that are no products, norms and biases, the work counts one operation each: less than 1 %.
    assert work(batch).operations == pytest.approx(counted.get_total_flops(), rel=0.01)
    model(input_ids=torch.full((1, CONTEXT), 3), past_key_values=caches[1], **run)
    layers: list[Any] = caches[1].layers
    of_one_cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    weights = sum(parameter.nbytes for parameter in model.model.language_model.parameters())
    adapters = sum(2 * rank * (d_out + d_in) for rank in ranks for d_out, d_in in shapes.values())
    assert work(4, ranks).num_bytes == weights + 4 * of_one_cache + adapters
    assert work(4, ranks).operations - work(4).operations == adapters  # two bytes and two operations per weight


def test_floor_of_other_work_is_at_the_same_speeds() -> None:
    times = FloorTimes(StepWork(100, 1000), reading=[1.0, 4.0], computing=[2.0, 3.0])
    assert times.floor() == [2.0, 4.0] and times.in_turn() == [3.0, 7.0]
    assert times.in_turn(StepWork(200, 500)) == [3.0, 9.5]


@pytest.mark.parametrize("step_tokens", (64, 7))
def test_counted_operations_of_a_prompt_are_those_of_the_layers(
    step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, num_tokens = small_config(), 40
    settings = EngineConfig(model="dummy", max_batch_size=1, max_step_tokens=step_tokens, arena_bytes=2**26)
    local = LocalEngine(settings, model=dummy_model(config, "float32", CPU, 0))
    done = 0

    def count(module: nn.Linear, given: tuple[Any, ...], _: Any) -> None:
        nonlocal done
        done += 2 * given[0].numel() * module.out_features

    hf_model = local.engine.parts.device.hf_model
    monkeypatch.setattr(adapted_linear, "joins", lambda *_: False)  # each layer is called
    last: Any = hf_model.text_model.layers[-1]
    limited = {last.self_attn.q_proj, last.self_attn.o_proj}  # they get all rows, and compute one
    for layer in hf_model.language_linears.values():
        if layer not in limited:
            layer.register_forward_hook(count)
    local.run([Request(request_id="a", prompt_ids=tuple(range(3, 43)), sampling=SamplingParams(max_tokens=1))])
    text: Any = config.text_config
    hidden, context = text.hidden_size, num_tokens * (num_tokens + 1) // 2
    attention = 4 * hidden * ((text.num_hidden_layers - 1) * context + num_tokens)
    rest = 2 * (2 * hidden * hidden) + 2 * hidden * text.vocab_size  # q and o of one row, and the output head
    assert done + attention + rest == prefill_flops(text, num_tokens)


# -- fitted costs -----------------------------------------------------------------------------------------------------

TRUE = Costs(
    base_s=0.1,
    token_s=1e-3,
    thin_token_s=4e-3,
    lane_s=8e-4,
    long_lane_s=2e-4,
    context_token_s=2e-6,
    adapter_s=4e-3,
    long_adapter_s=1.2e-2,
    short_lane=8,
    hidden_tokens=8,
    thin_tokens=24,
)


def some_size(draws: random.Random) -> StepSize:
    requests, merged = draws.randint(1, 32), draws.choice([None, "a0"])
    each = [1] * requests
    if draws.random() < 0.3:
        each[0] = draws.randint(50, 500)
    num_adapters = draws.randint(1, 8)
    items = [(f"a{draws.randrange(num_adapters)}", num_tokens) for num_tokens in each]
    return StepSize.holding(items, merged, draws.randint(0, 9000))


def test_linear_costs_are_recovered_from_noisy_samples() -> None:
    """Decode steps weigh as much as prefill steps: most steps of a run are decode steps. No cost is negative."""
    draws = random.Random(0)
    sizes = [some_size(draws) for _ in range(300)]
    found = fit_costs([StepSample(size, TRUE.step_s(size) * draws.gauss(1, 0.02)) for size in sizes], TRUE.thresholds)
    assert found[:8] == pytest.approx(TRUE[:8], rel=0.15, abs=1e-6)
    assert found.merge_s == found.back_s == 0
    small, large = StepSize(16, (), 3200), StepSize(512, (), 0)
    samples = [StepSample(small, 0.1), StepSample(StepSize(32, (), 6400), 0.11)] * 3 + [StepSample(large, 1.0)] * 3
    assert fit_costs(samples, TokenThresholds(short_lane=8)).step_s(small) == pytest.approx(0.1, rel=0.1)
    falling = [StepSample(StepSize(n, (), 0), 0.2 - 1e-4 * n) for n in (1, 100, 500)]
    assert min(fit_costs(falling, TokenThresholds(short_lane=8))) >= 0
    pictures = [StepSample(StepSize(0, (), 0, n), 2e-3 * n) for n in (256.0, 5476.0)]
    assert patch_cost(pictures) == pytest.approx(2e-3)
    assert Costs(patch_s=2e-3).step_s(pictures[1].size) == pytest.approx(pictures[1].seconds)


@pytest.mark.slow
def test_every_kind_of_step_is_timed() -> None:
    found = fit(BenchModel("small", small_config, 256 * 2**20), CPU, decode_steps=1, batches=((1, 8), (4, 16)))
    sizes = {sample.size for sample in found.samples}
    prompts = {size.lanes for size in sizes if size.num_tokens == 64}
    assert {(), (16,) * 4, (32, 32)} <= prompts, "no lane, distinct adapters, shared adapters"
    assert (16, 16, 32) in prompts, "two requests with two lanes each and two merged ones, with a read of their adapter"
    assert StepSize(4 + 16, (), 4 * 17) in sizes, "a prompt joins four decoding requests"
    assert StepSize(4 + 16, (1, 1, 1, 17), 4 * 17) in sizes, "with a longer lane than theirs"
    assert found.costs.short_lane == longest_short_lane(CPU, torch.bfloat16)
    assert found.costs.thin_tokens == thin_batches(torch.empty(4, 4, dtype=torch.bfloat16)).max_tokens
    assert found.costs.base_s > 0 and found.costs.merge_s >= 0 and found.load_s >= 0  # small beside other processes
    assert found.costs.patch_s > 0 and len({size.num_patches for size in sizes if not size.num_tokens}) == 4


# -- task heads -------------------------------------------------------------------------------------------------------


def test_a_head_and_words_are_asked_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[RequestOutput] = []
    step = TimedEngine.step

    def recorded(engine: TimedEngine) -> tuple[RequestOutput, ...]:
        outputs.extend(found := step(engine))
        return found

    monkeypatch.setattr(TimedEngine, "step", recorded)
    ask = benches.asking(small_config())
    for tokens in (0, 1, 3):
        outputs.clear()
        ask(2, 1, tokens)
        assert sum(len(output.token_ids) for output in outputs) == 2 * tokens
        assert sum(output.head is not None for output in outputs) == (0 if tokens else 2)


@pytest.mark.parametrize(("limit_s", "measured"), [(100.0, [1, 4, 8]), (5.0, [1, 4]), (0.5, [1])])
def test_shapes_after_one_that_takes_too_long_are_left_out(
    limit_s: float, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def timed(calls: Mapping[str, Callable[[], object]], *_: object, **__: object) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [asked[-1] / 2 if name == "0" else asked[-1]] for name in calls}

    monkeypatch.setattr(benches, "interleaved", timed)
    rows = benches.measure_tower(
        "tower", lambda batch, *_: asked.append(batch), [(batch, 1) for batch in (1, 4, 8)], 1, limit_s
    )
    assert list(dict.fromkeys(row["batch"] for row in rows)) == measured
    assert [row["ratio"] for row in rows] == [0.5] * len(rows)


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_clock_counts_work_and_skipped_time() -> None:
    worked = 3.0
    clock = Clock(lambda: worked)
    assert clock() == 3.0
    clock.skip_to(8.0)
    worked += 1.0
    assert clock() == 9.0 and clock.skipped_s == 5.0
    clock.skip_to(3.0)
    assert clock() == 9.0, "time does not run backwards"


@pytest.mark.exhaustive
def test_every_way_serves_all_requests_and_only_training_trains(tmp_path: Path) -> None:
    clock = Clock(time.thread_time)
    engine = beside.start(tmp_path, 1, clock)
    found = {way: Served() for way in ("alone", "beside, no promise")}
    for way in found:
        beside.serve(engine, clock, poisson(4.0, 5, seed=1), beside.WAYS[way], found[way])
        assert len(found[way].latencies_s) == 5 and min(found[way].latencies_s) > 0
    engine.close()
    assert found["alone"].num_tokens == 0 < found["beside, no promise"].num_tokens


# -- clusters ---------------------------------------------------------------------------------------------------------


def test_the_rate_rises_and_falls_and_popularity_drifts() -> None:
    """The most popular adapter of a period is not always the same one."""
    times = [arrival.time_s for arrival in cluster.rising_and_falling(20.0, 600.0)]
    thirds = [sum(low <= time_s < low + 200 for time_s in times) for low in (0, 200, 400)]
    assert times == sorted(times) and times[-1] <= 600
    assert thirds[1] > 1.6 * max(thirds[0], thirds[2])
    assert sum(thirds) == pytest.approx(20 * 600 * 2 / 3.14159, rel=0.05), "the mean of a sine's half wave"
    hottest = set()
    arrivals = cluster.drifting(20.0, 12_000, 16, seed=0)
    for _, period in itertools.groupby(arrivals, key=lambda arrival: arrival.time_s // 120):
        names = [arrival.adapter for arrival in period]
        hottest.add(max(set(names), key=names.count))
    assert 1 < len(hottest) < 5
