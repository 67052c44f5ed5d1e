"""End-to-end measurement of a running server, over HTTP and RPyC, with pictures, on all cores.

A `vlora serve` process and the baselines run in alternation, on the same requests: plain transformers, and PEFT's mixed
batch (`adapter_names`), in float32 and in bfloat16, because processors without bfloat16 products are faster in float32.
The time of a baseline excludes image processing and tokenization; the server's includes them.

With `url` any other server with OpenAI's API is measured instead, without a baseline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import served_config, small_served_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.serve.baseline import Baseline, PreparedRequest, prepare
from vlora.bench.serve.load import LoadRun, WorkloadRequest, drive, row, workload_requests
from vlora.bench.serve.model_folder import ModelFiles, write_model_files
from vlora.bench.serve.server_process import ServerProcess, served
from vlora.bench.serve.surfaces import ChatCompletions, RpycClient, token_from_environment
from vlora.bench.timing import threads_label
from vlora.bench.workload import Workload
from vlora.engine.host_resources import default_threads
from vlora.errors import BadConfig
from vlora.models.processing import InputProcessor

NEAR_TIE = 1e-3
"""Standard deviations of a step's logits. Two orders of summation in float32 differ by about 1e-5."""


class Agreement(NamedTuple):
    words: int  # number of compared, equal words
    wrong: str | None  # the difference, or None
    tie: bool  # whether the difference is at two equally likely words, which is no error; the rest is then not compared


def compare(expected: Sequence[str], margins: Sequence[float], got: str) -> Agreement:
    """Compare word by word.

    Args:
        expected: The text of each token; empty for tokens that have none.
        margins: Of each token over the second best, in standard deviations of its step's logits.
        got: The server's text, words separated by spaces.
    """
    kept = [(word, margin) for word, margin in zip(expected, margins, strict=True) if word]
    words = got.split()
    for index, (word, margin) in enumerate(kept):
        if index >= len(words) or words[index] != word:
            if margin <= NEAR_TIE:
                return Agreement(index, None, True)
            found = repr(words[index]) if index < len(words) else "the end"
            return Agreement(index, f"word {index} is {found} instead of {word!r} (margin {margin:.2g})", False)
    if len(words) > len(kept):
        return Agreement(len(kept), f"{len(words)} words instead of {len(kept)}", False)
    return Agreement(len(kept), None, False)


BASELINE_DTYPES = ("float32", "bfloat16")
_SLOW = 2.0
"""A baseline in the slower of two types runs only once if it takes more than this many times as long as the other."""
_CHECKED, _CHECKED_TOKENS = 6, 16


class ServeCase(NamedTuple):
    """One kind of traffic. The baseline's batch size is the number of outstanding requests at the server."""

    name: str
    baseline: str
    adapted: bool  # with adapters, or the base model
    alone: bool = False  # one request at a time

    def workload(self, workload: Workload, number: int) -> Workload:
        """The workload of one round, with its own pictures and texts."""
        workload = dataclasses.replace(workload, seed=workload.seed + number)
        if not self.alone:
            return workload
        return dataclasses.replace(workload, requests=1, duration_s=None, concurrency=1, rate=None)


# The name of the model without an adapter in requests over HTTP.
_BASE = "base"

CASES = {
    case.name: case
    for case in (
        ServeCase("one", "transformers", adapted=False, alone=True),
        ServeCase("base", "transformers", adapted=False),
        ServeCase("adapters", "PEFT mixed", adapted=True),
    )
}


def serving(files: ModelFiles, dtype: str, threads: int | None) -> AbstractContextManager[ServerProcess]:
    """`vlora serve` on loopback with user defaults, but without caches of prompts and pictures. threads None: its
    default.
    """
    flags = ["--model", files.model, "--served-model-name", _BASE, "--dtype", dtype]
    flags += [flag for name, path in files.adapters.items() for flag in ("--adapter", f"{name}={path}")]
    flags += ["--no-prefix-cache", "--vision-cache-bytes", "0", "--arena-bytes", str(2 * 2**30)]
    flags += ["--request-timeout-s", "600", "--max-requests", "1024"]
    return served(*flags, *([] if threads is None else ["--threads", str(threads)]))


Connect = Callable[[], ChatCompletions | RpycClient]


def own_server(server: ServerProcess, surface: str, files: ModelFiles) -> Connect:
    """Clients of a server that was started here. surface: http or rpyc."""
    names = list(files.adapters)
    if surface == "rpyc":
        return lambda: RpycClient(server.rpyc_port, names)
    return lambda: ChatCompletions(f"http://127.0.0.1:{server.http_port}/v1", _BASE, names)


def send_all(connect: Connect, workload: Workload, requests: Iterable[WorkloadRequest]) -> LoadRun:
    async def sent() -> LoadRun:
        client = connect()
        try:
            return await drive(workload, iter(requests), client)
        finally:
            await client.close()

    return asyncio.run(sent())


@dataclasses.dataclass
class Comparison:
    """Runs of a server and of baselines, in rounds.

    Attributes:
        connect: Makes a client of the server.
        by: The server's name in reports.
        workload: Of the cases `base` and `adapters`; `one` takes its first request.
        runs: By case, name of the system, and its dtype.
    """

    connect: Connect
    by: str
    workload: Workload
    cases: Sequence[ServeCase]
    rounds: int
    dtype: str | None = None
    threads: int | str | None = None
    runs: dict[tuple[str, str, str | None], list[LoadRun]] = dataclasses.field(default_factory=dict)

    def run(self, baselines: Mapping[str, Baseline] | None = None, processor: InputProcessor | None = None) -> None:
        """Run every round: each case of the server, then of each baseline, without concurrency."""
        for number, case in itertools.product(range(self.rounds), self.cases):
            one = case.workload(self.workload, number)
            found = send_all(self.connect, one, workload_requests(one, adapted=case.adapted))
            self.runs.setdefault((case.name, self.by, self.dtype), []).append(found)
            for dtype, baseline in (baselines or {}).items():
                if not self._too_slow(case, dtype):
                    found = baseline.run(_prepared(processor, one, case), one.concurrency)
                    self.runs.setdefault((case.name, case.baseline, dtype), []).append(found)

    def warm_up(self, baselines: Mapping[str, Baseline], processor: InputProcessor) -> None:
        """Send a few short answers of every kind, to load adapters and warm code and memory."""
        few: dict[str, Any] = {"requests": max(self.workload.adapters, 2), "duration_s": None, "rate": None}
        workload = dataclasses.replace(self.workload, **few, answer_tokens=3, popularity="uniform")
        for case in self.cases:
            send_all(self.connect, workload, workload_requests(workload, adapted=case.adapted))
            for baseline in baselines.values():
                baseline.run(_prepared(processor, workload, case)[:1], 1)

    def rows(self) -> Iterator[dict[str, Any]]:
        for (case, by, dtype), runs in self.runs.items():
            labels = {"case": case, "threads": self.threads, "by": by, "dtype": dtype}
            yield row(runs, **labels) | {"ours / it": None if by == self.by else self._ratio(case, runs)}

    def ratio(self, case: str) -> float:
        """Tokens per second relative to the faster baseline, the median over rounds."""
        baselines = (runs for (name, by, _), runs in self.runs.items() if name == case and by != self.by)
        return min(self._ratio(case, runs) for runs in baselines)

    @property
    def errors(self) -> list[str]:
        return [error for runs in self.runs.values() for run in runs for error in run.errors]

    def _ratio(self, case: str, theirs: Sequence[LoadRun]) -> float:
        # a slow baseline has only the first round
        pairs = zip(self.runs[case, self.by, self.dtype], theirs, strict=False)
        return statistics.median(ours.tokens_per_s / other.tokens_per_s for ours, other in pairs)

    def _too_slow(self, case: ServeCase, dtype: str) -> bool:
        own = (case.name, case.baseline)
        seconds = {its: runs[0].seconds for (*which, its), runs in self.runs.items() if tuple(which) == own}
        return dtype in seconds and seconds[dtype] > _SLOW * min(seconds.values())


def _prepared(processor: InputProcessor | None, workload: Workload, case: ServeCase) -> list[PreparedRequest]:
    """The requests of a case; with a duration, as many as run concurrently."""
    assert processor is not None, "baselines need one"
    count = workload.requests or workload.concurrency
    requests = itertools.islice(workload_requests(workload, adapted=case.adapted), count)
    return [prepare(processor, request) for request in requests]


def check_answers(connect: Connect, files: ModelFiles, workload: Workload, baseline: Baseline) -> dict[str, Any]:
    """Compare answers to a small set of requests, all at once, against the baseline's one by one.

    Args:
        connect: To a server in float32.
        baseline: In float32.

    Returns:
        Numbers of answers, of distinct answers, of compared words, and of answers compared only in part because two
        words were equally likely (`ties`); `wrong` lists the errors.
    """
    workload = dataclasses.replace(
        workload,
        requests=_CHECKED,
        duration_s=None,
        rate=None,
        concurrency=_CHECKED,
        answer_tokens=min(_CHECKED_TOKENS, workload.answer_tokens),
    )
    processor = InputProcessor.from_pretrained(files.model)
    torch.set_num_threads(default_threads())
    agreements: list[Agreement] = []
    texts: set[str] = set()
    for adapted in (True, False):
        requests = list(itertools.islice(workload_requests(workload, adapted=adapted), _CHECKED))
        run = send_all(connect, workload, requests)
        for answer, request in zip(run.answers, requests, strict=True):
            texts.add(answer.text)
            if answer.error is not None:
                agreements.append(Agreement(0, answer.error, False))
                continue
            greedy = baseline.greedy(prepare(processor, request))
            expected = [processor.decode([token]).strip() for token in greedy.token_ids]
            agreements.append(compare(expected, greedy.margins, answer.text))
    return {
        "answers": len(agreements),
        "distinct": len(texts),
        "words": sum(each.words for each in agreements),
        "ties": sum(each.tie for each in agreements),
        "wrong": [each.wrong for each in agreements if each.wrong is not None],
    }


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
        processor = InputProcessor.from_pretrained(files.model)
        default = (None,) if quick or default_threads() == 1 else (None, 1)
        for count in threads or default:
            with serving(files, dtype, count) as server:
                torch.set_num_threads(count or default_threads())
                for surface in surfaces:
                    about = f"vlora {surface}", workload, chosen, rounds, dtype, count or "default"
                    comparison = Comparison(own_server(server, surface, files), *about)
                    comparison.warm_up(baselines, processor)
                    comparison.run(baselines, processor)
                    rows += comparison.rows()
                    errors += comparison.errors
                    number = "default threads" if count is None else threads_label(count)
                    for case in chosen if promised else ():
                        name = f"{case.name}: {surface} / {case.baseline}, {number}"
                        goals.append(Goal(name, comparison.ratio(case.name), _GOALS[case.name], False))
        with serving(files, "float32", None) as server:
            for surface in surfaces:
                connect = own_server(server, surface, files)
                checks[surface] = check = check_answers(connect, files, workload, baselines["float32"])
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

    token = token_from_environment()
    comparison = Comparison(
        lambda: ChatCompletions(url, model or "", adapter_names, token), "server", workload, cases, rounds
    )
    comparison.run()
    found = _found(workload, comparison.errors) | {"title": f"vlora bench serve: {url}"}
    return Measured(list(comparison.rows()), found, [_failed(comparison.errors)])


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
