"""The papers' systems on a live server: figures 14, 19, 22 and 23 of V-LoRA. All serve the same weights and requests by
turns, with their own policy, operator and switch (`rival_engine.py`).
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.figure import Measuring
from vlora.bench.dummy import served_config, small_served_config
from vlora.bench.harness import say
from vlora.bench.report import Row
from vlora.bench.serve import check_answers, own_server, send_all
from vlora.bench.serve.baseline import Baseline
from vlora.bench.serve.load import LoadRun, workload_requests
from vlora.bench.serve.model_folder import ModelFiles, write_model_files
from vlora.bench.serve.server_process import ServerProcess, launched_server
from vlora.bench.workload import Workload
from vlora.simulator.measures import percentile

REFERENCE = "unmerged only"
"""The load is a share of the capacity of this system."""

_PICTURE = 112  # pixels a side: 16 tokens
_RETRIEVAL = "hottest:skew={skew},prompt_min=28,prompt_max=36,answer_min=12,answer_max=20,images=1"
_VIDEO = "video:streams={streams},frames=2,frame_tokens=24,answer=5,chunk={chunk}"
_BOUND = 5.0
"""Attainment: latency within so many times that of the reference without other requests."""
_SIDES: dict[str, Any] = {"picture_width": _PICTURE, "picture_height": _PICTURE}
_CHECKED = Workload(adapters=2, popularity="hottest", skew=0.8, prompt_tokens=36, **_SIDES)


class Point(NamedTuple):
    """Traffic. load: the rate, as a share of the reference's capacity. skew: the hottest adapter's share (retrieval).
    trace: a file of arrivals (traffic "trace").
    """

    traffic: str
    load: float = 0.9
    skew: float = 0.6
    adapters: int = 8
    trace: str = ""

    def workload(self, requests: int, rate: float, seed: int) -> Workload:
        """rate: requests per second; infinite ones arrive at once."""
        trace = self.trace
        if self.traffic == "retrieval":
            trace = f"{_RETRIEVAL.format(skew=self.skew)},rate={min(rate, 1e6)}"
        elif self.traffic == "video":  # a chunk of 30 frames a second, or longer chunks where that is too fast
            trace = _VIDEO.format(streams=self.adapters, chunk=max(1, round(30 * self.adapters / rate)))
        return Workload(requests=requests, trace=trace, adapters=self.adapters, seed=seed, prompt_tokens=64, **_SIDES)


def serve_systems(
    measuring: Measuring,
    names: Sequence[str],
    requests: int,
    repeats: int,
    point: Mapping[str, Any],
    over: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Latencies of each system, at all combinations of values, and whether its answers are right.

    Args:
        names: Of systems.
        requests: Of each point and repeat.
        repeats: Each with other requests, and the systems in the opposite order.
        point: What all points have in common.
        over: Values that differ, by name of an attribute of `Point`.
    """
    points = [Point(**{**point, **dict(zip(over, each, strict=True))}) for each in itertools.product(*over.values())]
    quick, device = measuring.setting.quick, measuring.setting.device.type
    with tempfile.TemporaryDirectory() as folder:
        config = small_served_config() if quick else served_config()
        files = write_model_files(config, Path(folder), max(each.adapters for each in points))
        wrong = {
            name: measuring.once(f"wrong answers, {name}", functools.partial(_wrong_answers, files, name, device))
            for name in names
        }
        known = {
            each: measuring.once(f"reference, {_about(each)}", functools.partial(_reference, files, each, device))
            for each in points
        }
        rates = {each: each.load * known[each]["requests/s"] for each in points}
        runs: dict[tuple[Point, str], list[LoadRun]] = {}
        for seed in range(1, repeats + 1):
            for name in names[:: 1 if seed % 2 else -1]:
                with _server(name, files, device) as server:
                    for each in points:
                        _run(server, files, each.workload(4, 1e9, 0))  # loads the adapters
                        runs.setdefault((each, name), []).append(
                            _run(server, files, each.workload(requests, rates[each], seed))
                        )
                say(f"{name}: repeat {seed} of {repeats}")
    rows = [
        _row(each, name, rates[each], _BOUND * known[each]["alone s"], runs[each, name])
        for each in points
        for name in names
    ]
    goals = [[f"answers of {name} unlike transformers' and PEFT's", count, 0, True] for name, count in wrong.items()]
    return {"rows": rows, "goals": goals}


def _about(point: Point) -> str:
    return f"{point.traffic} skew={point.skew:g} adapters={point.adapters}"


def _server(name: str, files: ModelFiles, device: str, dtype: str = "bfloat16") -> Any:
    """With one thread on a CPU, and without captured graphs on a GPU, which other operators cannot be part of."""
    config = {"model": files.model, "device": device, "dtype": dtype, "arena_bytes": 2**30, "threads": 1}
    config["cuda_graphs"] = False
    module = "benchmarks.paper.rival_engine"
    return launched_server(module, name, json.dumps(config), json.dumps(dict(files.adapters)))


def _run(server: ServerProcess, files: ModelFiles, workload: Workload) -> LoadRun:
    found = send_all(own_server(server, "rpyc", files), workload, workload_requests(workload, adapted=True))
    if found.errors:
        raise RuntimeError(f"a request failed: {found.errors[0]}")
    return found


def _reference(files: ModelFiles, point: Point, device: str) -> dict[str, float]:
    """Requests per second of the reference, which are all there at once, and the latency of single ones."""
    with _server(REFERENCE, files, device) as server:
        _run(server, files, point.workload(8, 1e9, 0))
        many = _run(server, files, point.workload(32, 1e9, 1))
        alone = [_run(server, files, point.workload(1, 1e9, seed)).seconds for seed in range(2, 7)]
    return {"requests/s": 32 / many.seconds, "alone s": statistics.median(alone)}


def _wrong_answers(files: ModelFiles, name: str, device: str) -> int:
    """Of a system in float32, compared with transformers and PEFT word by word."""
    baseline = Baseline.load(files.model, list(files.adapters.values()), "float32")
    with _server(name, files, device, "float32") as server:
        return len(check_answers(own_server(server, "rpyc", files), files, _CHECKED, baseline)["wrong"])


def _row(point: Point, name: str, rate: float, bound_s: float, runs: Sequence[LoadRun]) -> Row:
    """Latencies over all repeats; average token latency as V-LoRA 6.1; `spread`: of the repeats' averages."""
    each = [1e3 * _token_latency_s(run) for run in runs]
    seconds = [answer.end_s - answer.due_s for run in runs for answer in run.answers]
    return {
        **point._asdict(),
        "system": name,
        "rate": rate,
        "ms": statistics.fmean(each),
        "spread": max(each) / min(each) - 1,
        "p99 s": percentile(seconds, 99),
        "attainment": 100 * sum(second <= bound_s for second in seconds) / len(seconds),
        "requests/s": sum(len(run.answers) for run in runs) / sum(run.seconds for run in runs),
    }


def _token_latency_s(run: LoadRun) -> float:
    return sum(answer.end_s - answer.due_s for answer in run.answers) / (run.answer_tokens + run.prompt_tokens)
