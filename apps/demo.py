"""The main job, live: fuse four domains, serve them, ask every head, ask in words, stream a video; then a table.

`vlora demo` runs it. Fusing and serving are other processes, started through the `vlora` command;
this one is only a client.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from apps.video_analytics import CHUNKS_IN_FLIGHT, AnnotatedVideo, ChunkResult, Source, analyse
from vlora.client import Client
from vlora.errors import VLoraError

VLORA = (sys.executable, "-m", "vlora.cli")
MODES = ("merged", "mixed", "unmerged")

_THREADS = 16  # requests under way at once
_STOP_S = 15.0


def run(
    out: Path, *, plan: str = "demo", command: Sequence[str] = VLORA, console: Console | None = None
) -> dict[str, Any]:
    """Do the whole job and write OUT/report.json; returns the same. OUT/fused keeps adapters and test data.

    Raises VLoraError when a step ends with an error, which it has printed itself.
    """
    console = console or Console()
    fused = out / "fused"
    console.rule("1. fuse: domains into adapters")
    if subprocess.run([*command, "fuse", plan, "--out", str(fused)]).returncode != 0:
        raise VLoraError("the demo ends here: `vlora fuse` failed, see above")
    report = json.loads((fused / "report.json").read_text())
    console.rule("2. serve: engine and front end")
    with _serving(command, report["base"], fused / "adapters", console) as client:
        console.rule("3. every domain's test pictures, asked of its head, all domains at once")
        head_latencies = _ask_heads(client, fused / "test", report["domains"])
        for domain in report["domains"]:
            console.print(f"{domain['name']}: {domain['served']:.3f} of {domain['num_served']} right")
        console.rule("4. the same in words")
        word_latencies = _ask_in_words(client, fused / "test", report["domains"], console)
        console.rule("5. a video, a second at a time")
        streams = [_stream(client, domain, fused / "test", out, console) for domain in report["domains"]]
        stats = client.stats()
    streamed = [result.latency_s for stream in streams for result in stream]
    result = {
        "domains": report["domains"],
        "adapters": report["adapters"],
        "rollbacks": report["rollbacks"],
        "served": {mode: stats.requests_by_mode.get(mode, 0) for mode in MODES},
        "switches": stats.num_switches,
        "latencies": {
            "head": _percentiles(head_latencies, _THREADS),
            "words": _percentiles(word_latencies, 1),
            "stream": _percentiles(streamed, CHUNKS_IN_FLIGHT),
        },
    }
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    console.rule("6. what came out")
    console.print(_table(result))
    _print_totals(result, console)
    console.print(f"the same facts: {out / 'report.json'}")
    return result


# -- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _serving(command: Sequence[str], model: str, adapters: Path, console: Console) -> Iterator[Client]:
    """`vlora serve` on any free port, from its ready line to its end."""
    options = ("--model", model, "--adapters", str(adapters), "--rpyc-port", "0")
    # For this demonstration alone, on loopback: it takes no tokens of the user's.
    open_to_all = os.environ | {"VLORA_TOKEN": "", "VLORA_ADMIN_TOKEN": ""}
    server = subprocess.Popen([*command, "serve", *options], stdout=subprocess.PIPE, text=True, env=open_to_all)
    assert server.stdout is not None
    try:
        line = server.stdout.readline().strip()
        match = re.match(r"ready: rpyc (\S+):(\d+) ", line)
        if match is None:
            raise VLoraError("the demo ends here: `vlora serve` failed, see above")
        console.print(line, highlight=False)
        with Client(match[1], int(match[2])) as client:
            yield client
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()


# -- what is asked ----------------------------------------------------------------------------------------------------


def _samples(folder: Path) -> list[tuple[tuple[Path, ...], str]]:
    """(frames, label) of every test sample that fusing wrote for a domain."""
    entries = json.loads((folder / "labels.json").read_text())
    return [(tuple(folder / file for file in entry["frames"]), entry["label"]) for entry in entries]


def _ask_heads(client: Client, tests: Path, domains: list[dict[str, Any]]) -> list[float]:
    """Ask for every test sample, domains interleaved; adds `served` (accuracy) and `num_served` to each domain."""
    latencies: list[float] = []

    def ask(domain: dict[str, Any], frames: tuple[Path, ...], label: str) -> bool:
        started = time.monotonic()
        result = client.ask_head(frames, domain["adapter"], domain["name"])
        latencies.append(time.monotonic() - started)
        return result.label == label

    asked = [[(domain, *sample) for sample in _samples(tests / domain["name"])] for domain in domains]
    turns = [each for turn in itertools.zip_longest(*asked) for each in turn if each is not None]
    with ThreadPoolExecutor(_THREADS) as threads:
        right = list(threads.map(lambda each: ask(*each), turns))
    for domain in domains:
        own = [hit for hit, (asked_domain, *_) in zip(right, turns, strict=True) if asked_domain is domain]
        domain["served"] = sum(own) / len(own)
        domain["num_served"] = len(own)
    return latencies


def _ask_in_words(
    client: Client, tests: Path, domains: list[dict[str, Any]], console: Console, *, num_each: int = 3
) -> list[float]:
    """Ask each domain's question in words, of the base model and of its adapter, and show what they say."""
    questions = {head.name: head.prompt for status in client.adapters() for head in status.heads}
    table = Table("question", "shown", "base model says", "adapter says")
    latencies = []
    for domain in domains:
        for frames, label in _samples(tests / domain["name"])[:num_each]:
            said = []
            for adapter in (None, domain["adapter"]):
                started = time.monotonic()
                said.append(client.generate(questions[domain["name"]], frames, adapter, max_tokens=8).text)
                latencies.append(time.monotonic() - started)
            table.add_row(questions[domain["name"]], label, *said)
    console.print(table)
    return latencies


def _stream(client: Client, domain: dict[str, Any], tests: Path, out: Path, console: Console) -> list[ChunkResult]:
    """Stream the domain's test video, if it has one, and write it with the answers drawn on it."""
    described = tests / domain["name"] / "stream.json"
    if not described.exists():
        return []
    stream = json.loads(described.read_text())
    video = described.parent / stream["video"]
    results = []
    source = Source(domain["name"], str(video), "file")
    annotated = AnnotatedVideo(out / f"{domain['name']}.webm")
    answers = analyse(client, source, domain["adapter"], domain["name"], shown=True)
    for (chunk, result), shown in zip(answers, stream["labels"], strict=False):
        annotated.add(chunk, result)
        console.print(
            f"{result.start_s:5.1f} s  {result.label} ({result.confidence:.0%}, {result.latency_s * 1e3:.0f} ms)"
            f"   shown: {shown}",
            highlight=False,
        )
        results.append(result)
    domain["stream"] = {
        "video": str(video),
        "seconds": len(results),
        "right": sum(result.label == shown for result, shown in zip(results, stream["labels"], strict=False)),
    }
    annotated.close()
    console.print(f"with the answers drawn on it: {annotated.path}")
    return results


# -- what came out ----------------------------------------------------------------------------------------------------


def _percentiles(seconds: Sequence[float], at_once: int) -> dict[str, float | int | None]:
    """Latencies as the client saw them with `at_once` requests under way; None where nothing was asked."""
    counts = {"count": len(seconds), "at_once": at_once}
    if len(seconds) < 2:
        return {**counts, "p50_s": None, "p95_s": None}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {**counts, "p50_s": cuts[49], "p95_s": cuts[94]}


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="accuracy on test data")
    for column in ("domain", "data", "adapter"):
        table.add_column(column)
    for column in ("threshold", "before", "after", "served"):
        table.add_column(column, justify="right")
    for domain in result["domains"]:
        table.add_row(
            domain["name"],
            domain["real_or_synthetic"],
            domain["adapter"],
            f"{domain['threshold']:.2f}",
            f"{domain['before']:.3f}",
            f"{domain['after']:.3f}",
            f"{domain['served']:.3f} of {domain['num_served']}",
        )
    return table


def _print_totals(result: dict[str, Any], console: Console) -> None:
    say = {
        "adapters made": f"{len(result['adapters'])} for {len(result['domains'])} domains, "
        f"{len(result['rollbacks'])} rolled back",
        "requests per mode": ", ".join(f"{mode} {count}" for mode, count in result["served"].items()),
        "switches": str(result["switches"]),
    }
    for kind, values in result["latencies"].items():
        if values["p50_s"] is not None:
            p50, p95 = (f"{values[name] * 1e3:.0f} ms" for name in ("p50_s", "p95_s"))
            say[f"latency, {kind}"] = f"p50 {p50}, p95 {p95} ({values['count']} asked, {values['at_once']} at once)"
    table = Table(show_header=False)
    for name, value in say.items():
        table.add_row(name, value)
    console.print(table)
