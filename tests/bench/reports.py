"""Reports of benches whose measurements are replaced: `report_of(name, slow)` for measurements `slow` times as bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks import atmm, cluster, gateway, recall, streams
from benchmarks import training as beside
from benchmarks.fusion import packing
from benchmarks.gateway import RequestTimes
from benchmarks.gpu import attention, heads, merge, policies, prefill, styles
from benchmarks.gpu import serve as load
from benchmarks.gpu import step as decode
from benchmarks.gpu.profile import KINDS
from benchmarks.paper import FIGURES
from benchmarks.paper.figure import Claim
from benchmarks.training import Served
from vlora.bench import costs, serve, step, tp
from vlora.bench.harness import Measured, measured
from vlora.bench.report import Goal, Report
from vlora.bench.step import StepWork
from vlora.orchestrator.cost_model import StepSize

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

    def engine(*_: Any, quantize: str = "none", **__: Any) -> MagicMock:
        made = MagicMock()
        made.engine.parts.device.slabs.num_bytes = 3 * slow if quantize == "int8" else 10
        return made

    patch(step, "dummy_model", "reading", "computing", "_transformers_step", interleaved=seconds)
    patch(step, language_shapes=lambda model: {}, DecodeWork=lambda *_: lambda *_: StepWork(100, 1000))
    patch(step, _timed_engine=engine)
    plain, quantized = measured(step.BENCH, True), measured(step.BENCH, True, quantize="int8")
    return dataclasses.replace(plain, goals=[*plain.goals, *quantized.goals])


def _atmm(patch: Patch, slow: float) -> Report:
    def cell(case: Any, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
        row = {"dtype": case.dtype, "tokens": case.num_tokens, "adapters": case.num_adapters, "chosen / best": slow}
        row |= {"layer": "896x4864", "rank": case.rank, "us": 10.0, "chosen": "loop" if case.even else "tiled m16 n64"}
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


def _cluster(patch: Patch, slow: float) -> Report:
    samples = [[0, 3], [2, 4], [1, 0]] * 4
    hour = [
        cluster.row(
            part=cluster.HOUR, case=cluster.HOUR_MAIN, rule=rule, active=active, batch=25.0 / slow, samples=samples
        )
        for rule, active in (("punica", 3.0 * slow), ("least_loaded", 15.0))
    ]
    drift = [
        cluster.row(part=cluster.DRIFT, case=cluster.DRIFT_MAIN, rule=rule, loads=loads, **{"ttft p99 s": late})
        for rule, loads, late in (("placed", 100 * slow, 0.5 * slow), ("least_loaded", 1000, 1.0))
    ]
    decisions = [cluster.row(part=cluster.DECISIONS, N=number, **{"p99 us": 20.0 * slow}) for number in (2, 1000)]
    patch(cluster, hour=lambda _: hour, drift=lambda _: drift, decisions=lambda _: decisions)
    return measured(cluster.BENCH, True)


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
    patch(serve, "Baseline", "InputProcessor", "serving", "served_config", "write_model_files")
    patch(serve, Comparison=lambda *_: comparison)
    patch(serve, check_answers=lambda *_: check, default_threads=lambda: 1)
    return measured(serve.BENCH, False)


def _streams(patch: Patch, slow: float) -> Report:
    async def measure(server: object, threads: int, quick: bool, totals: Any, draws: object) -> list[dict[str, Any]]:
        totals.lost = totals.failed = int(slow > 1)
        shown = {"threads": threads, "tasks": 1, "adapters": "ordinary"}
        return [{**shown, "fps": fps, "cameras": round(40 / fps)} for fps in (5.0, 1.0)]

    patch(streams, "served", "write_adapters", measure=measure)
    return measured(streams.BENCH, True)


def _tp(patch: Patch, slow: float) -> Report:
    row = {"phase": "decode", "batch": 1, "auto / other": slow}
    patch(tp, "RanksEngine", _write_adapters=lambda *_: {}, rows_of=lambda *_: [row])
    return measured(tp.BENCH, True)


def _training(patch: Patch, slow: float) -> Report:
    def serve(engine: object, clock: object, gaps: object, slowdown: float | None, found: Served) -> None:
        found.latencies_s += [1.0] * 100 if slowdown is None else [1.0] * 90 + [1.05 * slow] * 10
        found.seconds, found.num_tokens = 10.0, 0 if slowdown is None else int(500 / slow)

    patch(beside, "start", measure_capacity=lambda *_: 1.0, serve=serve)
    return measured(beside.BENCH, True)


def _fusion(patch: Patch, slow: float) -> Report:
    def method(adapters: float, test: float) -> dict[str, Any]:
        return {"adapters": round(adapters), "trainings": 3.5 * slow, "training s": 9.0, "test": {"a": test, "b": test}}

    methods = {
        packing.ALONE: method(2, 0.9),
        packing.ALL: method(1, 0.9 if slow > 1 else 0.5),
        packing.DEFAULT: method(slow, 0.9 / slow),
    }
    found = {"seed": 0, "thresholds": {"a": 0.8, "b": 0.7}, "missed alone": [], "lower bound": 1, "methods": methods}
    made = packing.combine({"table-0": Measured([], {"tables": found})})
    return Report("fusion", made.rows, packing.goals(made))


def _retrieve(patch: Patch, slow: float) -> Report:
    rows = []
    for owner, found in ((recall.BASE, 0.5), (recall.ADAPTER, 0.5 / slow)):
        own = {"words": (0.5, 0.5), recall.TOGETHER: (0.6 / slow, 0.75), recall.FEW: (0.5, 0.75 / slow)}
        for method, (precision, at_10) in own.items():
            values = {"mAP": precision, "recall at 5": found, "recall at 10": at_10}
            rows.append({"videos": "a", "method": f"{owner}, {method}", **values})
    return Report("retrieve", rows, recall.goals_of(rows))


def _paper(patch: Patch, slow: float) -> Report:
    """Each claim on two rows, its own and the one that it is compared with, with equal values where `slow` is 1."""

    def goal(claim: Claim) -> Goal:
        of, to, column = claim.number.of, claim.number.to, claim.number.column
        own: dict[str, Any] = {name: value[0] if isinstance(value, list) else value for name, value in of.items()}
        value = slow if claim.at_most else slow**-2
        rows = [{str(claim.number.against): 1.0, **own, column: value}, {**own, **to, column: 1.0}]
        number = claim.number.number(rows if to else rows[:1])
        assert number is not None, f"no rows fit {claim}"
        return Goal(claim.name, number, claim.bound, claim.at_most)

    return Report("paper", [], [goal(claim) for figure in FIGURES for claim in figure.goals])


MAKERS: dict[str, Callable[[Patch, float], Report]] = {
    "step": _step,
    "atmm": _atmm,
    "costs": _costs,
    "cluster": _cluster,
    "gateway": _gateway,
    "serve": _serve,
    "streams": _streams,
    "tp": _tp,
    "training": _training,
    "fusion": _fusion,
    "retrieve": _retrieve,
    "paper": _paper,
}
"""Makers of reports by bench."""


def _step_goals(slow: float) -> list[Goal]:
    rows = [
        {"kind": kind, "batch": batch, "graph": graph, "ms": 1.0, "host ms": 0.5 * slow, "ratio": 1.1 * slow}
        for kind in ("merged, fp8", "merged, int4", *(each.name for each in KINDS))
        for batch in (32, 16, 1)
        for graph in (True, False)
    ]
    ms = {"none": 1.0, "merged": 1.0, "merged, fp8": 3 * slow, "merged, int4": 2 * slow}
    for row in rows:
        row["ms"] = ms.get(str(row["kind"]), 1.05 * slow)
    captured = decode.goals_of(rows, 12.0 * slow, "H200")
    return captured if slow == 1 else [*decode.goals_of(rows, None, "H200")[:1], *captured[1:]]


STYLES = ("sgmv", "bgmv", "mbgmm", "vllm", "sglang")  # of kernels, which need Triton

STAGE_GOALS: dict[str, Callable[[float], list[Goal]]] = {
    "attention": lambda slow: attention.goals_of(
        [
            {"case": f"decode, batch {case}", "us": us * slow, "torch us": us}
            for case, us in (("32 x 2048", 40.0), ("1 x 2048", 10.0), ("1 x 16384", 10.0))
        ],
        "H200",
    ),
    "merge": lambda slow: merge.goals_of(
        [{"rank": 16, "merge / bytes": slow, "back ms": 0.05 * slow, "first ms": slow, "merge ms": 1.0}],
        merge.Drift(1e-3 * slow, 0.0, 0.0 if slow == 1 else 1e-6),
    ),
    "heads": lambda slow: heads.goals_of(
        [{"streams": 0, "answer": "words", "ms": 10.0}, {"streams": 0, "answer": "head", "ms": 5.0 * slow}]
    ),
    "policies": lambda slow: policies.goals_of(
        [
            {"policy": name, "traffic": "retrieval", "ms": ms, "wait": wait}
            for name, ms, wait in (("cost_based", 1.0 * slow, 0.5), ("dlora", 1.1, 0.9), ("merged_only", 0.1, 1.5))
        ]
    ),
    "prefill": lambda slow: prefill.goals_of(
        [{"mode": "merged", "ms": 40.0 * slow}, {"mode": "unmerged", "ms": 42.0 * slow**2}],
        [{"ms": 7.0 * slow, "first ms": 20.0 * slow}] * 4,
        "H100",
    ),
    "serve": lambda slow: load.goals_of(5000.0 / slow, 1.2 * slow, 4.0 / slow, "H100"),
    "step": _step_goals,
    "styles": lambda slow: styles.goals_of(
        [{"tokens": 1024, "ours / floor": 1.2 * slow, **dict.fromkeys(("einsum", *STYLES), 3.0 / slow)}],
        STYLES,
        1.1 * slow,
        round(4 * slow),
    ),
}
"""Goals of the stages of `vlora gpu-check` that have some."""
