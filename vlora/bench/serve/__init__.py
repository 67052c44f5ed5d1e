"""End-to-end measurement of a running server, over HTTP and RPyC, with pictures, on all cores.

The baselines run in alternation with it in the same run, on the same requests: plain transformers, and PEFT's mixed
batch (`adapter_names`), in float32 and in bfloat16, because processors without bfloat16 products are faster in float32.
The time of a baseline excludes image processing and tokenization; the server's includes them.

With `url` any other server with OpenAI's API is measured instead, without a baseline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlora.bench.dummy import served_config, small_served_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.serve.baseline import Baseline
from vlora.bench.serve.comparison import (
    BASELINE_DTYPES,
    CASES,
    Comparison,
    ServeCase,
    check_answers,
    serving,
)
from vlora.bench.serve.load import LoadRun, drive, row
from vlora.bench.serve.model_folder import write_model_files
from vlora.bench.serve.surfaces import ChatCompletions, token_from_environment
from vlora.bench.serve.workload import Workload, workload_requests
from vlora.bench.timing import threads_label
from vlora.engine.host_resources import default_threads
from vlora.errors import BadConfig

__all__ = ["BENCH"]

_GOALS = {"one": 1.8, "base": 2.0, "adapters": 3.0}
_COUNTING = (
    "Latencies start at a request's due time; ITL is between two pieces of text. 'ours / it' compares answer tokens "
    "per second, the median over rounds; goals compare with the faster of the baseline's types. A baseline in the "
    "slower type runs once if it takes more than twice as long. Default workload: 8 requests over 4 adapters, 256 "
    "tokens in with a 224 x 224 picture, 32 out; the server has no prefix cache and no cache of embeddings"
)


def cases(quick: bool, **settings: Any) -> dict[str, dict[str, Any]]:
    return {"all": {"quick": quick, **settings}}


def measure(case: Mapping[str, Any]) -> Measured:
    return _measure(**case)


def _measure(
    quick: bool,
    *,
    surfaces: Sequence[str] = ("http",),
    threads: Sequence[int] = (),
    cases: Sequence[str] = tuple(CASES),
    rounds: int | None = None,
    dtype: str = "bfloat16",
    url: str | None = None,
    model: str | None = None,
    adapter_names: Sequence[str] = (),
    **settings: Any,
) -> Measured:
    """Measure a 0.5 B-parameter Qwen2-VL with a vision tower of 98 million parameters and random weights."""
    if quick:
        settings = {"answer_tokens": 8, **settings}
    if "duration_s" in settings:
        settings = {"requests": None, **settings}
    rounds = rounds or (2 if quick else 3)
    chosen = [CASES[name] for name in cases]
    if url is not None:
        if surfaces != ("http",) or threads:
            raise BadConfig(
                "--url measures over HTTP with the server's own number of threads; remove --surface and --threads"
            )
        return _other_server(url, model, adapter_names, chosen, rounds, settings)
    if model is not None or adapter_names:
        raise BadConfig("names of a model and of adapters require another server; also give its --url")
    workload = Workload(**settings)
    # The goals are defined for this workload on the large model; ratios of short runs are not comparable.
    promised = not quick and dataclasses.replace(workload, seed=0) == Workload()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    errors: list[str] = []
    checks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = small_served_config() if quick else served_config()
        files = write_model_files(config, Path(folder), workload.adapters)
        baselines = {each: Baseline.load(files.model, list(files.adapters.values()), each) for each in BASELINE_DTYPES}
        default = (None,) if quick or default_threads() == 1 else (None, 1)
        for count in threads or default:
            with serving(files, dtype, count) as server:
                for surface in surfaces:
                    comparison = Comparison(files, workload, chosen, dtype, surface, count, rounds)
                    comparison.run(server, baselines)
                    rows += comparison.rows()
                    errors += comparison.errors
                    number = "default threads" if count is None else threads_label(count)
                    for case in chosen if promised else ():
                        name = f"{case.name}: {surface} / {case.baseline}, {number}"
                        goals.append(Goal(name, comparison.ratio(case.name), _GOALS[case.name], False))
        with serving(files, "float32", None) as server:
            for surface in surfaces:
                checks[surface] = check = check_answers(server, surface, files, workload, baselines["float32"])
                name = f"wrong of {check['answers']} greedy answers in float32 ({check['words']} words), {surface}"
                goals.append(Goal(name, float(len(check["wrong"])), 0.0, True))
    goals.append(_failed(errors))
    return Measured(rows, _found(workload, errors) | {"answers": checks}, goals)


def _failed(errors: Sequence[str]) -> Goal:
    return Goal("requests that failed", float(len(errors)), 0.0, True)


def _other_server(
    url: str,
    model: str | None,
    adapter_names: Sequence[str],
    cases: Sequence[ServeCase],
    rounds: int,
    settings: dict[str, Any],
) -> Measured:
    if model is None and any(not case.adapted for case in cases):
        raise BadConfig(
            "the case needs the name of the base model at --url; give --model, or select only the case 'adapters'"
        )
    if not adapter_names:
        cases = [case for case in cases if not case.adapted]
    workload = Workload(**{**settings, "adapters": max(1, len(adapter_names))})

    async def measure(case: ServeCase, number: int) -> LoadRun:
        one = case.workload(workload, number)
        send = ChatCompletions(url, model or "", adapter_names, token_from_environment())
        try:
            return await drive(one, workload_requests(one, adapted=case.adapted), send)
        finally:
            await send.close()

    runs: dict[str, list[LoadRun]] = {case.name: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            runs[case.name].append(asyncio.run(measure(case, number)))
    rows = [
        row(found, case=name, threads=None, by="server", dtype=None) | {"ours / it": None}
        for name, found in runs.items()
    ]
    errors = [error for found in runs.values() for run in found for error in run.errors]
    return Measured(rows, _found(workload, errors) | {"title": f"vlora bench serve: {url}"}, [_failed(errors)])


def _found(workload: Workload, errors: Sequence[str]) -> dict[str, Any]:
    return {
        "workload": dataclasses.asdict(workload),
        "errors": list(errors[:20]),
        "counting": _COUNTING,
        "default threads": default_threads(),
    }


_SETTINGS = {each.name for each in dataclasses.fields(Workload)} - {"seed"}

BENCH = Bench(
    name="serve",
    cases=cases,
    measure=measure,
    options=frozenset({"surfaces", "threads", "cases", "rounds", "dtype", "url", "model", "adapter_names", *_SETTINGS}),
)
