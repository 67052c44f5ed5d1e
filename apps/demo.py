"""The demonstration: fuse domains, serve them, query every head, generate text, stream cameras, compare modes; then a
table and a page.

Run by `vlora demo`. Fusing and serving run in other processes, started through the `vlora` command; this process is
only a client.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from apps.video_analytics import CHUNKS_IN_FLIGHT, AnnotatedVideo, ChunkResult, Source, analyse
from vlora.client import Client
from vlora.errors import VLoraError
from vlora.opencv import cv2, frame_times, frames_at
from vlora.run_folder import write_whole
from vlora.types.video import shown_at

VLORA = (sys.executable, "-m", "vlora.cli")

_STOP_S = 15.0


@contextlib.contextmanager
def serving(model: str, adapters: Path, command: Sequence[str], console: Console, *options: str) -> Iterator[Client]:
    """A server on a free port of this machine, from its ready line, which is printed, to the end of the block.

    Args:
        command: that runs `vlora`.
        options: further flags of `vlora serve`.

    Raises:
        VLoraError: the server did not start; it has printed its own error.
    """
    flags = ("--model", model, "--adapters", str(adapters), "--rpyc-port", "0", *options)
    # The server runs on loopback for one caller only and uses no token from the environment.
    open_to_all = os.environ | {"VLORA_TOKEN": "", "VLORA_ADMIN_TOKEN": ""}
    server = subprocess.Popen([*command, "serve", *flags], stdout=subprocess.PIPE, text=True, env=open_to_all)
    assert server.stdout is not None
    try:
        line = server.stdout.readline().strip()
        match = re.match(r"ready: rpyc (\S+):(\d+) ", line)
        if match is None:
            raise VLoraError("`vlora serve` failed, see above")
        console.print(line, highlight=False)
        with Client(match[1], int(match[2])) as client:
            yield client
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()


_END = "</main>"
_POSTER_S = 1.5  # seconds from the start of a video


def write_page(file: Path, fused: Path, result: Mapping[str, Any]) -> None:
    """Write fusion's page followed by the results of serving. fused: the folder of fusion's page, next to or below
    `file`'s folder; links are made relative to `file`. Videos are named in `result`, in the same folder as `file`.
    """
    environment = Environment(loader=PackageLoader("apps", "."), autoescape=True, undefined=StrictUndefined)
    posters = {
        domain["name"]: poster(file.parent / domain["stream"]["annotated"])
        for domain in result["domains"]
        if "stream" in domain
    }
    served = environment.get_template("demo.html.j2").render(result=result, posters=posters)
    page = (fused / "report.html").read_text()
    page = page.replace('href="adapters/', f'href="{fused.relative_to(file.parent).as_posix()}/adapters/')
    before, end, after = page.rpartition(_END)
    write_whole(file, f"{before}{served}{end}{after}".encode(), durable=False)


def poster(video: Path) -> str:
    """A frame of a video as a data URL (JPEG), which browsers show until playback."""
    (time_s,) = shown_at(frame_times(str(video)), [_POSTER_S])
    shown = next((picture for _, picture in frames_at(str(video), [time_s])), None)
    if shown is None:
        return ""
    encoded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes()
    return f"data:image/jpeg;base64,{base64.b64encode(encoded).decode()}"


T = TypeVar("T")
MODES = ("merged", "mixed", "unmerged")

_THREADS = 16  # concurrent requests
_LINE_S = 10.0  # between two lines of progress in a log
_WORDS = 12  # maximum tokens of a text answer
_BUSY = 10  # concurrent requests to the busy adapter
TURNS, TURN_S = 12, 0.7  # of each server


def run(
    out: Path, *, plan: str = "demo", command: Sequence[str] = VLORA, console: Console | None = None
) -> dict[str, Any]:
    """Run the whole demonstration and write OUT/report.json, OUT/report.html and an annotated video per camera;
    returns the content of the JSON. OUT/fused contains adapters, test data and fusion's own report.

    Exits with the code of `vlora fuse` if that fails; it has then printed its own error.
    """
    console = console or Console()
    fused = out / "fused"
    console.rule("1. fuse: domains into adapters")
    output = sys.stderr if console.stderr else None  # same stream as the console
    if code := subprocess.run([*command, "fuse", plan, "--out", str(fused), "--restart"], stdout=output).returncode:
        sys.exit(code)
    report = json.loads((fused / "report.json").read_text())
    console.rule("2. serve: engine and front end")
    server = functools.partial(serving, report["base"], fused / "adapters", command, console)
    with server() as client:
        console.rule("3. test pictures of every domain, all domains concurrently")
        head_latencies, beside_heads = _ask_all(client, fused / "test", report["domains"], console)
        for domain in report["domains"]:
            if domain["served"] is not None:
                console.print(f"{domain['name']}: {domain['served']:.3f} of {domain['num_served']} right")
        console.rule("4. text answers of base model and adapters")
        word_latencies = _ask_in_words(client, fused / "test", report["domains"], console)
        console.rule("5. camera streams, with concurrent questions to other adapters")
        streamed, beside_streams = _stream_all(client, report["domains"], fused / "test", out, console)
        console.rule("6. one busy adapter beside others, by turns with a server that never merges")
        with server("--policy", "unmerged_only") as unmerged:
            gained = _compare(client, unmerged, fused / "test", report["domains"], console)
        stats = client.stats()
    num_cameras = sum("stream" in domain for domain in report["domains"])
    result = {
        "domains": report["domains"],
        "adapters": report["adapters"],
        "rollbacks": report["rollbacks"],
        "served": {mode: stats.requests_by_mode.get(mode, 0) for mode in MODES},
        "switches": stats.num_switches,
        "gained": gained,
        "latencies": {
            "head": _percentiles(head_latencies, _THREADS),
            "words": _percentiles(word_latencies, 1),
            "stream": _percentiles([result.latency_s for result in streamed], CHUNKS_IN_FLIGHT * num_cameras),
            "words beside heads": _percentiles(beside_heads, _THREADS),
            "words beside streams": _percentiles(beside_streams, 1),
        },
    }
    write_whole(out / "report.json", json.dumps(result, indent=2).encode() + b"\n", durable=False)
    console.rule("7. results")
    console.print(_table(result))
    _print_totals(result, console)
    write_page(out / "report.html", fused, result)
    console.print(f"report: {out / 'report.json'}; with pictures: {out / 'report.html'}")
    return result


# -- the queries ------------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """label: empty if text cannot express it completely (boxes)."""

    frames: tuple[Path, ...]
    question: str
    label: str


def _samples(folder: Path) -> list[_Sample]:
    """All test samples that fusing wrote for a domain."""
    entries = json.loads((folder / "labels.json").read_text())
    return [
        _Sample(tuple(folder / file for file in entry["frames"]), entry["question"], entry["label"])
        for entry in entries
    ]


def _ask_all(
    client: Client, tests: Path, domains: list[dict[str, Any]], console: Console
) -> tuple[list[float], list[float]]:
    """Query every test sample under its domain's name, domains interleaved; returns the latencies of answers by heads
    and in words. Adds to each domain `answered_by`, `num_served`, and `served`: the fraction of correct answers, None
    if labels are not comparable.
    """
    latencies: dict[bool, list[float]] = {True: [], False: []}

    def ask(domain: dict[str, Any], sample: _Sample) -> bool:
        started = time.monotonic()
        answer = client.generate(sample.question, sample.frames, domain["name"], max_tokens=_WORDS)
        latencies[answer.result is not None].append(time.monotonic() - started)
        domain["answered_by"] = "words" if answer.result is None else f"{answer.result.task} head"
        return answer.text.strip().lower() == sample.label.lower()

    by_domain = [[(domain, sample) for sample in _samples(tests / domain["name"])] for domain in domains]
    turns = [each for turn in itertools.zip_longest(*by_domain) for each in turn if each is not None]
    with ThreadPoolExecutor(_THREADS) as threads:
        answers = threads.map(lambda each: ask(*each), turns)
        right = list(_shown(answers, len(turns), "asking", console))
    for domain in domains:
        own = [(hit, sample) for hit, (of, sample) in zip(right, turns, strict=True) if of is domain]
        domain["num_served"] = len(own)
        domain["served"] = sum(hit for hit, _ in own) / len(own) if all(sample.label for _, sample in own) else None
    return latencies[True], latencies[False]


def _ask_in_words(client: Client, tests: Path, domains: list[dict[str, Any]], console: Console) -> list[float]:
    """Ask each domain's question as text, of the base model and of its adapter, and print the answers."""
    table = Table("domain", "correct", "base model", "adapter", box=SIMPLE, padding=0, pad_edge=False)
    latencies = []
    for domain in _shown(domains, len(domains), "text answers", console):
        for frames, question, label in _samples(tests / domain["name"])[:2]:
            if not label:
                continue
            texts = []
            for adapter in (None, domain["adapter"]):
                started = time.monotonic()
                texts.append(client.generate(question, frames, adapter, answer="words", max_tokens=_WORDS).text)
                latencies.append(time.monotonic() - started)
            table.add_row(domain["name"], label, *texts)
    console.print(table)
    return latencies


def _shown(items: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    """The same items, with a progress bar on a terminal and otherwise a line every `_LINE_S` seconds."""
    if console.is_terminal:
        yield from track(items, what, total=total, console=console, transient=True)
        return
    printed = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - printed >= _LINE_S:
            printed = time.monotonic()
            console.print(f"{what}: {done} of {total}")
        yield item


def _stream_all(
    client: Client, domains: list[dict[str, Any]], tests: Path, out: Path, console: Console
) -> tuple[list[ChunkResult], list[float]]:
    """Stream all domains' videos at once, each through its own head, with concurrent text questions, those of other
    adapters first. Returns the chunks' results and the latencies of the questions.
    """
    cameras = [domain for domain in domains if (tests / domain["name"] / "stream.json").exists()]
    streamed_through = {camera["adapter"] for camera in cameras}
    others = [domain for domain in domains if domain not in cameras]
    others = [domain for domain in others if domain["adapter"] not in streamed_through] or others
    done = threading.Event()
    latencies: list[float] = []

    def ask() -> None:
        turns = itertools.cycle([(domain, *_samples(tests / domain["name"])[0]) for domain in others])
        for domain, frames, question, _ in turns:
            if done.is_set():
                return
            started = time.monotonic()
            client.generate(question, frames, domain["adapter"], answer="words", max_tokens=_WORDS)
            latencies.append(time.monotonic() - started)

    with ThreadPoolExecutor(len(cameras) + 1) as threads:
        asking = threads.submit(ask) if cameras and others else None
        try:
            streams = list(threads.map(lambda camera: _stream(client, camera, tests, out, console), cameras))
        finally:
            done.set()
    if asking is not None:
        asking.result()
    return [result for stream in streams for result in stream], latencies


def _compare(
    client: Client, unmerged: Client, tests: Path, domains: list[dict[str, Any]], console: Console
) -> dict[str, Any]:
    """Answers per second of both servers by turns, under `_BUSY` concurrent text requests to the adapter with most
    domains, one to its head, and one to each other adapter and to the base model; and the first server's requests by
    mode.
    """
    heads = {head.name for status in client.adapters() for head in status.heads}
    by_adapter: dict[str | None, list[dict[str, Any]]] = {None: domains[:1]}
    for domain in sorted(domains, key=lambda domain: domain["name"] in heads):  # those without a head first
        by_adapter.setdefault(domain["adapter"], []).append(domain)
    busy = max(reversed(by_adapter), key=lambda adapter: len(by_adapter[adapter]))
    callers = [
        (adapter, own[0], False) for adapter, own in by_adapter.items() for _ in range(_BUSY if adapter == busy else 1)
    ]
    callers += [(busy, domain, True) for domain in by_adapter[busy] if domain["name"] in heads][-1:]

    def answers_per_s(server: Client) -> float:
        ends = time.monotonic() + TURN_S

        def ask(adapter: str | None, domain: dict[str, Any], by_head: bool) -> int:
            for count, (frames, question, _) in enumerate(itertools.cycle(samples[domain["name"]])):
                if time.monotonic() >= ends:
                    return count
                if by_head:
                    server.ask_head(frames, domain["name"])
                else:
                    server.generate(question, frames, adapter, answer="words", max_tokens=_WORDS)
            raise AssertionError("a domain has test samples")

        with ThreadPoolExecutor(len(callers)) as threads:
            counts = list(threads.map(lambda caller: ask(*caller), callers))
        return sum(counts) / (time.monotonic() - ends + TURN_S)

    samples = {domain["name"]: _samples(tests / domain["name"]) for _, domain, _ in callers}
    before = client.stats().requests_by_mode
    turns = [(answers_per_s(client), answers_per_s(unmerged)) for _ in range(TURNS)]
    after = client.stats().requests_by_mode
    ours, theirs = (statistics.fmean(rates) for rates in zip(*turns, strict=True))
    found = {
        "answers_per_s": ours,
        "unmerged_only_per_s": theirs,
        "gain": ours / theirs - 1,
        "requests": {mode: after.get(mode, 0) - before.get(mode, 0) for mode in MODES},
    }
    console.print(_gain_line(found), highlight=False)
    return found


def _gain_line(gained: dict[str, Any]) -> str:
    return (
        f"{round(100 * gained['gain']):+d}% answers per second ({gained['answers_per_s']:.0f}, "
        f"{gained['unmerged_only_per_s']:.0f} unmerged only)"
    )


def _stream(client: Client, domain: dict[str, Any], tests: Path, out: Path, console: Console) -> list[ChunkResult]:
    """Stream a domain's test video and write it with the answers drawn on it; adds `stream` to the domain."""
    folder = tests / domain["name"]
    stream = json.loads((folder / "stream.json").read_text())
    labels = stream["labels"]
    results: list[ChunkResult] = []
    source = Source(domain["name"], str(folder / stream["video"]), "file")
    annotated = AnnotatedVideo(out / f"{domain['name']}.webm")
    for chunk, result in analyse(client, source, domain["name"], domain["name"], shown=True):
        annotated.add(chunk, result)
        shown = f"   shown: {labels[len(results)]}" if labels and len(results) < len(labels) else ""
        console.print(
            f"{domain['name']}, {result.start_s:5.1f} s  {result.label} ({result.confidence:.0%}, "
            f"{result.latency_s * 1e3:.0f} ms){shown}",
            highlight=False,
        )
        results.append(result)
    annotated.close()
    domain["stream"] = {
        "video": str(folder / stream["video"]),
        "annotated": annotated.path.name,
        "seconds": len(results),
        "right": sum(result.label == shown for result, shown in zip(results, labels, strict=False)) if labels else None,
    }
    console.print(f"{domain['name']}, annotated video: {annotated.path}")
    return results


# -- results ----------------------------------------------------------------------------------------------------------


def _percentiles(seconds: Sequence[float], at_once: int) -> dict[str, float | int | None]:
    """Latencies at the client with `at_once` concurrent requests; None without requests."""
    counts = {"count": len(seconds), "at_once": at_once}
    if len(seconds) < 2:
        return {**counts, "p50_s": None, "p95_s": None}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {**counts, "p50_s": cuts[49], "p95_s": cuts[94]}


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="accuracy on test data", box=SIMPLE, padding=0, pad_edge=False)
    for column in ("domain", "pixels", "adapter", "by"):
        table.add_column(column)
    for column in ("threshold", "before", "after", "served"):
        table.add_column(column, justify="right")
    for domain in result["domains"]:
        table.add_row(
            domain["name"],
            domain["real_or_synthetic"],
            domain["adapter"],
            domain["answered_by"].split()[-1],
            f"{domain['threshold']:.2f}",
            f"{domain['before']:.3f}",
            f"{domain['after']:.3f}",
            "-" if domain["served"] is None else f"{domain['served']:.3f}",
        )
    return table


def _outcomes(rollbacks: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Numbers of trainings that were not kept, and, if there are any, of those of which a part was."""
    partly = sum(bool(rollback["stayed"]) for rollback in rollbacks)
    return {"rolled back": len(rollbacks) - partly} | ({"partly kept": partly} if partly else {})


def _print_totals(result: dict[str, Any], console: Console) -> None:
    say = {
        "adapters made": f"{len(result['adapters'])} for {len(result['domains'])} domains, "
        + ", ".join(f"{count} {outcome}" for outcome, count in _outcomes(result["rollbacks"]).items()),
        "requests per mode": ", ".join(f"{mode} {count}" for mode, count in result["served"].items()),
        "switches": str(result["switches"]),
        "modes, busy adapter": ", ".join(f"{mode} {count}" for mode, count in result["gained"]["requests"].items()),
        "gain by modes": _gain_line(result["gained"]),
    }
    for kind, values in result["latencies"].items():
        if values["p50_s"] is not None:
            p50, p95 = (f"{values[name] * 1e3:.0f} ms" for name in ("p50_s", "p95_s"))
            say[f"latency, {kind}"] = f"p50 {p50}, p95 {p95} ({values['count']} asked, {values['at_once']} at once)"
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in say.items():
        table.add_row(name, value)
    console.print(table)
