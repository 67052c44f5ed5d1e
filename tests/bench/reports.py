"""Reports of benches whose measurements are replaced: `report_of(name, slow)` for measurements `slow` times as bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks import (
    atmm,
    cluster,
    gateway,
    heads,
    learning,
    loading,
    memory,
    merge,
    overload,
    overload_kv,
    packed,
    policy,
    reuse,
    soak,
    streams,
    vision,
)
from benchmarks import cluster_decisions as decisions
from benchmarks import training as beside
from benchmarks.cluster_simulation import row as cluster_row
from benchmarks.gateway import RequestTimes
from benchmarks.learning import Frame, Run
from benchmarks.split import mixed, split
from benchmarks.training import Served
from tests.bench.split_rows import LATENCIES, MIX, of_all_parts, of_an_engine, windows
from vlora.bench import costs, serve, step, tp
from vlora.bench.harness import measured
from vlora.bench.rank import RankMemory
from vlora.bench.report import Report
from vlora.bench.step import StepWork
from vlora.orchestrator import Costs, StepSize

Patch = Callable[..., None]
"""Replaces names of a module; names without a value by a mock."""


def report_of(name: str, slow: float) -> Report:
    """The report of a bench on measurements that meet its goals if `slow` is 1, and miss them if it is 100."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def patch(module: ModuleType, *names: str, **values: Any) -> None:
            for each, value in {**{name: MagicMock() for name in names}, **values}.items():
                monkeypatch.setattr(module, each, value)

        return MAKERS[name](patch, slow)


def _rows(*rows: Any) -> Callable[..., Iterator[Any]]:
    return lambda *_, **__: iter(rows)


def _step(patch: Patch, slow: float) -> Report:
    def seconds(calls: Mapping[str, object], *_: Any, **__: Any) -> dict[str, list[float]]:
        first = next(iter(calls)).rpartition(" ")[0]
        known = {first: slow, "transformers": 10.0, "reading": 0.6, "computing": 0.4}
        if first == "int8":
            known = {first: 0.3 * slow}
        return {key: [known.get(key.rpartition(" ")[0], 1.0)] * 3 for key in calls}

    def engine(*given: Any, **_: int) -> MagicMock:
        made = MagicMock()
        made.engine.parts.device.slabs.num_bytes = 3 * slow if given[-1] == "int8" else 10
        return made

    patch(step, "dummy_model", "write_adapter", "reading", "computing", "_transformers_step", interleaved=seconds)
    patch(step, language_shapes=lambda model: {}, DecodeWork=lambda *_: lambda *_: StepWork(100, 1000))
    patch(step, _timed_engine=engine)
    plain, quantized = measured(step.BENCH, True), measured(step.BENCH, True, quantize="int8")
    return dataclasses.replace(plain, goals=[*plain.goals, *quantized.goals])


def _merge(patch: Patch, slow: float) -> Report:
    ours = {name: [slow, slow] for name in ("merge", "rewrite", "rewrite back", "subtract", "subtract back")}
    theirs = {"copy": [1.0, 1.0], "PEFT merge": [8.0, 8.0], "PEFT unmerge": [8.0, 8.0], "back": [5e-4 * slow] * 2}
    drift = SimpleNamespace(subtracting=1e-4 * slow, rewriting=slow - 1, restored=slow - 1, _asdict=dict)
    patch(merge, _calls=lambda rank: ({}, 1.0, 1.0), interleaved=lambda *_, **__: ours | theirs)
    patch(merge, drift_in_place=lambda *_: drift)
    return measured(merge.BENCH, True)


def _atmm(patch: Patch, slow: float) -> Report:
    def cell(case: Any, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
        row = {"dtype": case.dtype, "tokens": case.num_tokens, "adapters": case.num_adapters, "chosen / best": slow}
        others = ("gather and bmm", "padded einsum", "plain loop", "PEFT layer")
        row |= {"segments": "even" if case.even else "uneven", **dict.fromkeys(others, 10.0 / slow)}
        return row, {"chosen": [1.0] * 18 + [slow] * 2, "a": [1.0] * 20}

    patch(atmm, measure_cell=cell)
    return measured(atmm.BENCH, True)


def _costs(patch: Patch, slow: float) -> Report:
    fit = SimpleNamespace(samples=[(StepSize(1, (), 0), 0.1)] * 3, load_s=0.0, error=0.0)
    fit.costs = SimpleNamespace(step_s=lambda size: 0.1 * slow, _asdict=dict)
    patch(costs, measure_costs=lambda *_: fit)
    return measured(costs.BENCH, True)


def _policy(patch: Patch, slow: float) -> Report:
    row = {"skew": 0.6, "load": 0.9, "ours / best in bound": slow, policy.OURS: 0.5 * slow, policy.BASELINE: 1.0}
    row |= {policy.FLOOR: 0.5, "algorithm1": 1.0}
    cells = {app: policy.Cell(app, 0.9, 1.0, 0.6, 2, None, ()) for app in ("retrieval", "video")}
    patch(policy, measure_costs=lambda *_: None, measure_policies=lambda *_, **__: [])
    patch(policy, costs_as_dict=lambda *_: {"costs": {**Costs()._asdict(), "load_s": 0.0}})
    patch(policy, _retrieval=_rows(cells["retrieval"]), _video=_rows(cells["video"]))
    patch(policy, _row=lambda cell, *_: {"app": cell.app, **row})
    patch(policy, decision_ms=lambda *_: 0.1 * slow)
    return measured(policy.BENCH, True)


def _memory(patch: Patch, slow: float) -> Report:
    def served(engine: object, num_adapters: int, *_: object) -> SimpleNamespace:
        few = num_adapters == 100
        return SimpleNamespace(
            requests_s=1.0 if few else 1.0 / slow,
            load_waits=slow > 1,
            distinct=1,
            loads=1,
            loading_ms=[1.0],
            step_ms=[1.0],
        )

    clock = iter((0.0, slow))
    patch(memory, "dummy_model", "write_adapter", "TimedEngine", "_record_loading_times", language_shapes=lambda _: {})
    patch(memory, _own_bytes=lambda *_: 1, _run_requests=served, _overhead=lambda *_: 0.5 * slow)
    patch(memory, time=SimpleNamespace(perf_counter=lambda: next(clock)))
    return measured(memory.BENCH, True)


def _loading(patch: Patch, slow: float) -> Report:
    def load(engine: object, steps: object, paths: object, load_s: list[float]) -> list[float]:
        load_s.append(1.0)
        return [slow] * 3

    patch(loading, "dummy_model", "TimedEngine", "write_adapter", language_shapes=lambda _: {}, _load=load)
    patch(loading, _steps=lambda engine: iter(lambda: 1.0, None))
    return measured(loading.BENCH, True)


def _reuse(patch: Patch, slow: float) -> Report:
    def seconds(calls: Mapping[str, Callable[[], object]], *_: Any, **__: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [slow if place else 1.0] for place, name in enumerate(calls)}

    patch(reuse, "_QuestionEngine", "_adapter_engine", interleaved=seconds)
    return measured(reuse.BENCH, True)


def _overload(patch: Patch, slow: float) -> Report:
    row = {"in time": 1 / slow, "of capacity": 1 / slow, "refusal p99 s": 0.1 * slow, "bound s": 1.0}
    kv = {"of fed": 1 / slow, "computed / needed": slow, "wait p99 / bound": 0.5 * slow, "policy": "any"}
    patch(overload, _in_simulator=_rows({"where": "simulated", **row}), _on_engine=_rows({"where": "engine", **row}))
    patch(overload_kv, rows=_rows(*({"where": f"KV room, {where}", **kv} for where in ("simulated", "engine"))))
    patch(overload, decision_ms=lambda *_, **__: 0.1 * slow)
    return measured(overload.BENCH, True)


def _cluster(patch: Patch, slow: float) -> Report:
    rates = ((1, 6.0), (2, 12.0 / slow), (4, 24.0 / slow))
    parts = {
        "hour": [
            cluster_row(cluster.HOUR, cluster.HOUR_MAIN, rule=rule, active=active, batch=25.0 / slow)
            for rule, active in (("punica", 3.0 * slow), ("least_loaded", 15.0))
        ],
        "placing": [
            cluster_row(cluster.DRIFT, cluster.DRIFT_MAIN, rule=rule, loads=loads, ttft_p99_s=late)
            for rule, loads, late in (("placed", 100 * slow, 0.5 * slow), ("least_loaded", 1000, 1.0))
        ],
        "growing": [
            *(cluster_row(cluster.WORKERS, "", N=number, req_per_s=rate) for number, rate in rates),
            cluster_row(cluster.ADAPTERS, "20 adapters", rule="placed", latency_s=3.0),
            cluster_row(cluster.ADAPTERS, "2000 adapters", rule="placed", latency_s=3.0 * slow),
        ],
        "scale": [{"N": 4, "case": "requests", "CPU s": 20.0 * slow, "MiB": 50.0 * slow}],
    }
    decided = [
        *(cluster_row(decisions.DECISIONS, "waiting", N=number, p99_us=20.0 * slow) for number in (2, 1000)),
        cluster_row(decisions.PLANS, "co-migration, 16 adapters", p50_us=100.0 * slow, share=0.01 * slow),
        cluster_row(decisions.PLANS, "16 adapters, a replica leaves", share=0.1 * slow),
    ]
    patch(cluster, **{name: lambda quick, rows=rows: rows for name, rows in parts.items()})
    patch(decisions, decisions=lambda quick: decided)
    return measured(cluster.BENCH, True)


def _heads(patch: Patch, slow: float) -> Report:
    row = {"tower": "ViT", "frames": 1, "floor": 0.25, "ratio": 0.5 * slow, "answer tokens": 5}
    compared = {"domain": "actions", "test samples": 9, "head": 0.9 / slow, "words": 0.9}
    patch(
        heads, latency_rows=lambda *_, **__: [{"batch": batch, **row} for batch in (1, 8)], compare=lambda _: [compared]
    )
    return measured(heads.BENCH, True)


def _gateway(patch: Patch, slow: float) -> Report:
    pair = RequestTimes(0.1, 1.0), RequestTimes(0.1 + 1e-3 * slow, 1.0 + 1e-3 * slow), 0.2
    patch(gateway, "launched_server", "_DirectEngine", "Client", "BlockingHttpClient", "InputProcessor")
    patch(gateway, _compare=_rows(((16, "HTTP"), pair), ((16, "RPyC"), pair)))
    return measured(gateway.BENCH, True)


def _serve(patch: Patch, slow: float) -> Report:
    comparison = MagicMock()
    comparison.rows.return_value, comparison.errors = [{}], ["broken"] if slow > 1 else []
    comparison.ratio = lambda name: 10.0 / slow
    check = {"answers": 12, "words": 60, "wrong": ["another word"] if slow > 1 else []}
    patch(serve, "Baseline", "serving", "served_config", "write_model_files", Comparison=lambda *_, **__: comparison)
    patch(serve, check_answers=lambda *_: check, default_threads=lambda: 1)
    return measured(serve.BENCH, False)


def _vision(patch: Patch, slow: float) -> Report:
    def engine(config: object, share: float) -> MagicMock:
        whole = share == float("inf")
        times = SimpleNamespace(plain=[1.0], beside=[slow], total_s=1.0 if whole else slow)
        return MagicMock(run=lambda *_: times)

    patch(vision, _VisionEngine=engine)
    return measured(vision.BENCH, True)


def _soak(patch: Patch, slow: float) -> Report:
    result = MagicMock(wrong=["lost"] if slow > 1 else [], memory_mib={"engine": [(0.0, 1.0)]}, frame_s=[1.0], cores={})
    result.latencies = lambda bad: [slow if bad else 1.0]
    result.growth = lambda name: slow

    async def run_clients(*_: object) -> Any:
        return result

    patch(soak, "embedded_model_server", _run_clients=run_clients)
    return measured(soak.BENCH, True)


def _streams(patch: Patch, slow: float) -> Report:
    async def measure(server: object, threads: int, quick: bool, totals: Any, draws: object) -> list[dict[str, Any]]:
        totals.lost = totals.failed = int(slow > 1)
        return [{"cameras": 3}]

    patch(streams, "launched_server", "write_adapters", measure=measure)
    return measured(streams.BENCH, True)


def _tp(patch: Patch, slow: float) -> Report:
    rank = MagicMock(memory=RankMemory(1, 1, {}), measure=lambda: [None], record_collectives=lambda: [{}] * 11)
    ranks = MagicMock()
    ranks.return_value.__enter__.return_value = rank
    row = {"phase": "decode", "batch": 1, "auto / other": slow}
    patch(tp, "hidden_dtype", run_ranks=ranks, _write_adapters=lambda *_: {}, rows_of=lambda *_: [row])
    patch(tp, _names=lambda: [None] * 10, formula=lambda *_: {}, differs=lambda *_: slow > 1)
    return measured(tp.BENCH, True)


def _split(patch: Patch, slow: float) -> Report:
    latencies = LATENCIES if slow == 1 else {**LATENCIES, mixed.MIXED: (4.1, 4.2, 5.2)}
    shown = windows(latencies, trained=3)
    if slow > 1:  # fewer tokens beside training
        fewer = windows(latencies, trained=0)[mixed.MIXED]
        shown[mixed.MIXED] = [
            each._replace(events=[each.events[0]._replace(tokens=1), *each.events[1:]]) for each in fewer
        ]
    parts = {
        "memory": of_all_parts(8, 0.7 * slow, 80.0 * slow, 9.0 * slow),
        "engine": of_an_engine(0.7 * slow, 1.05 * slow),
        "mixed": mixed.rows_of(shown, MIX),
    }
    patch(split, "write_checkpoint", PARTS={name: lambda *_, rows=rows: rows for name, rows in parts.items()})
    return measured(split.BENCH, True)


def _packed(patch: Patch, slow: float) -> Report:
    def seconds(calls: Mapping[str, Callable[[], object]], *_: Any, **__: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {label: [1.0 if label.startswith(packed.PLAIN) else 0.5 * slow] for label in calls}

    patch(packed, "Qwen2VLForConditionalGeneration", "PlainTraining", "HFModel", interleaved=seconds)
    patch(packed, PackedTraining=lambda *_: MagicMock(pieces=[1.0]), losses_apart=lambda *_: 1e-6 * slow)
    return measured(packed.BENCH, True)


def _training(patch: Patch, slow: float) -> Report:
    alone, with_training = Served([1.0] * 100, 10.0, 0), Served([1.0] * 90 + [1.05 * slow] * 10, 10.0, int(500 / slow))
    found = {"alone": alone, "beside": with_training}
    rows = [row for load in (0.3, 0.9) for row in beside.rows_of("processor", load, 1.0, found)]
    late = {"alone": alone, "beside": Served([9.0] * 100, 10.0, 0)}
    patch(beside, in_one_engine=lambda size: rows)
    patch(beside, in_processes=lambda size: beside.rows_of("wall", 0.9, 1.0, late))  # counts other work: no goal
    return measured(beside.BENCH, True)


def learned(protected: bool, *phases: tuple[str, float], event: str = "promoted") -> Run:
    """A run with phases of 10 pictures, one a second, with these shares of right answers; an event is in the second."""
    frames = [
        Frame(100.0 + 10 * place + number, phase, number < 10 * share, f"version-{phase}")
        for place, (phase, share) in enumerate(phases)
        for number in range(10)
    ]
    audit_log = [{"at": 112.5, "event": "training", "why": ""}, {"at": 115.5, "event": event, "why": "it is better"}]
    return Run(protected, frames, audit_log)


PROTECTED = ("usual", 1.0), ("changed", 0.4), ("promoted", 0.9), ("after the attack", 0.9), ("rolled back", 0.9)
UNPROTECTED = ("promoted", 0.9), ("attack", 0.5), ("after the attack", 0.3)
ATTACKED = (
    ("usual", 1.0),
    ("attack", 0.5),
    ("changed", 0.8),
    ("promoted", 0.8),
    ("after the attack", 0.4),
    ("rolled back", 0.3),
)
HARMLESS = ("attack", 0.9), ("promoted", 0.9)


def _learning(patch: Patch, slow: float) -> Report:
    async def nothing(*_: object) -> Any:
        return None

    runs = (
        learned(True, *(PROTECTED if slow == 1 else ATTACKED)),
        learned(False, *(UNPROTECTED if slow == 1 else HARMLESS)),
    )

    async def with_protections(*_: object) -> Any:
        return runs[0], None

    async def without(*_: object) -> Run:
        return runs[1]

    patch(learning, "write_data", first_adapter=nothing, protected_run=with_protections, unprotected_run=without)
    return measured(learning.BENCH, True)


MAKERS: dict[str, Callable[[Patch, float], Report]] = {
    "step": _step,
    "merge": _merge,
    "atmm": _atmm,
    "costs": _costs,
    "policy": _policy,
    "memory": _memory,
    "loading": _loading,
    "reuse": _reuse,
    "overload": _overload,
    "cluster": _cluster,
    "heads": _heads,
    "gateway": _gateway,
    "serve": _serve,
    "vision": _vision,
    "soak": _soak,
    "streams": _streams,
    "tp": _tp,
    "split": _split,
    "packed": _packed,
    "training": _training,
    "learning": _learning,
}
"""Makers of reports by bench; those without goals are left out."""
