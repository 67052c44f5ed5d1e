"""Decoding clients with and without training ones on one executor: the paper's figures 22 and 23 in shape.

In each way clients begin together: those of inference answer a number of requests, each a prefill and then tokens, and
the others train meanwhile. The window that counts ends with the first client that has answered its requests, so that
all of them are at work in it. A forward or backward pass of training that ends later does not count. The ways run by
turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.split.base_process import WHOLE_CALLS
from benchmarks.split.processes import Mix, Process, Size, row, running
from vlora.bench.report import Goal

WHAT = "figures 22 and 23: decoding beside training"
ALL, FEWER, MIXED, WHOLE = WAYS = (
    "inference only",
    "inference of the mix by itself",
    "inference and training",
    "inference and training, whole calls",
)
"""FEWER: without the clients that train in the mix. WHOLE: without pieces and pauses of large calls."""

KINDS = ("decode", "prefill", "train")
NICE = 10  # of trainings: beside the executor, all clients share a processor
ROWS = 2  # of a request, and of a training step
BIN_S = 0.25
"""Of the curves."""
_POLICIES = ("opportunistic", WHOLE_CALLS)
_LEAD_S = 0.2  # from a command to its beginning


class Event(NamedTuple):
    """A client's work between two times of a window, in seconds. kind: one of `KINDS`."""

    kind: str
    start_s: float
    end_s: float
    tokens: float

    def within(self, first_s: float, last_s: float) -> float:
        """The tokens between two times, if they are spread evenly."""
        shared = min(self.end_s, last_s) - max(self.start_s, first_s)
        return self.tokens * max(0.0, shared) / (self.end_s - self.start_s)


class Window(NamedTuple):
    """The events of one way. busy: the executor's processor time as a share of it."""

    seconds: float
    events: Sequence[Event]
    busy: float

    def rate(self, kinds: Iterable[str] = KINDS) -> float:
        counted = [event for event in self.events if event.kind in kinds]
        return sum(event.within(0.0, self.seconds) for event in counted) / self.seconds

    def curve(self, kind: str) -> list[float]:
        """Tokens a second of each quarter of a second."""
        bins = [BIN_S * number for number in range(int(self.seconds / BIN_S))]
        counted = [event for event in self.events if event.kind == kind]
        return [round(sum(event.within(at, at + BIN_S) for event in counted) / BIN_S, 1) for at in bins]

    def latency_ms(self, kind: str = "decode") -> float:
        """Mean time of a decoded token of a client, for all its rows; or of a prefill."""
        counted = [event for event in self.events if event.kind == kind and event.end_s <= self.seconds]
        return 1e3 * statistics.fmean(event.end_s - event.start_s for event in counted)

    def phases(self) -> tuple[float, float]:
        """Tokens a second of inference, while a client is in prefill and while none is."""
        inference = [event for event in self.events if event.kind != "train"]
        spans = _union([(event.start_s, event.end_s) for event in inference if event.kind == "prefill"], self.seconds)
        prefill_s = sum(end - start for start, end in spans)
        tokens = sum(event.within(*span) for event in inference for span in spans)
        all_tokens = self.rate(("decode", "prefill")) * self.seconds
        rest_s = self.seconds - prefill_s
        return tokens / prefill_s if prefill_s else 0.0, (all_tokens - tokens) / rest_s if rest_s else 0.0


def _union(spans: Sequence[tuple[float, float]], until: float) -> list[tuple[float, float]]:
    """Spans without overlaps, up to a time."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((start, min(end, until)) for start, end in spans if start < until):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def window_of(
    inference: Iterable[Mapping[str, Any]], training: Iterable[Mapping[str, Any]], begin: float, busy: float
) -> Window:
    """The window of clients' answers. begin: its time on the clients' clock."""
    served = [_events(answer, begin) for answer in inference]
    seconds = min(events[-1].end_s for events in served)
    trained = [event for answer in training for event in _events(answer, begin) if event.end_s <= seconds]
    return Window(seconds, [*(event for events in served for event in events), *trained], busy)


def _events(answer: Mapping[str, Any], begin: float) -> list[Event]:
    return [Event(kind, start - begin, end - begin, tokens) for kind, start, end, tokens in answer["events"]]


def measure(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """Run all ways by turns; a first turn of one request does not count."""
    mix = size.mix
    addresses = {policy: f"unix:{checkpoint.parent}/mixed{place}.sock" for place, policy in enumerate(_POLICIES)}
    windows: dict[str, list[Window]] = {way: [] for way in WAYS}
    flags = [flag for address in addresses.values() for flag in ("--base", address)]
    with (
        running(
            *(
                Process("base_process", str(checkpoint), address, "--policy", policy)
                for policy, address in addresses.items()
            )
        ) as bases,
        running(*(Process("worker", str(checkpoint), *flags) for _ in range(mix.inference))) as inference,
        running(
            *(Process("worker", str(checkpoint), "--nice", str(NICE), *flags) for _ in range(mix.training))
        ) as training,
    ):
        for turn in range(mix.rounds + 1):
            for way in WAYS:
                place = _POLICIES.index(WHOLE_CALLS) if way == WHOLE else 0
                served = inference if way == ALL else inference[: mix.inference - mix.training]
                trained = training if way in (MIXED, WHOLE) else ()
                extent = mix if turn else mix._replace(requests=1)
                stop = checkpoint.parent / f"stop-{turn}-{WAYS.index(way)}"
                window = _run(bases[place], place, served, trained, extent, stop)
                if turn:
                    windows[way].append(window)
    return rows_of(windows, mix)


def _run(
    base: Process, place: int, inference: Sequence[Process], training: Sequence[Process], mix: Mix, stop: Path
) -> Window:
    """One window of clients of an executor. stop: a file that ends the trainings."""
    before, begin = base.cpu_s(), time.monotonic() + _LEAD_S
    shared = {"client": place, "begin": begin, "rows": ROWS, "length": mix.prompt}
    for client in inference:
        client.send({"do": "infer", "tokens": mix.answer, "requests": mix.requests, **shared})
    for client in training:
        client.send({"do": "finetune", "until": str(stop), **shared})
    served = [client.answer() for client in inference]
    busy = (base.cpu_s() - before) / (time.monotonic() - begin)
    stop.touch()
    return window_of(served, [client.answer() for client in training], begin, busy)


def rows_of(windows: Mapping[str, Sequence[Window]], mix: Mix) -> list[dict[str, Any]]:
    """A row for each way: medians over the rounds. `ratio` is that of the latency to inference only, of one round."""
    found = []
    for way, of_way in windows.items():
        pairs = zip(of_way, windows[ALL], strict=True)
        values = {
            "tokens a second": statistics.median(window.rate() for window in of_way),
            "latency ms": statistics.median(window.latency_ms() for window in of_way),
            "ratio": statistics.median(window.latency_ms() / first.latency_ms() for window, first in pairs),
            "first token ms": statistics.median(window.latency_ms("prefill") for window in of_way),
            "prefill": statistics.median(window.phases()[0] for window in of_way),
            "generation": statistics.median(window.phases()[1] for window in of_way),
            "training": statistics.median(window.rate(("train",)) for window in of_way),
            "executor busy": statistics.median(window.busy for window in of_way),
            "curves": [of_way[0].curve(kind) for kind in KINDS],
        }
        clients = mix.inference - (mix.training if way == FEWER else 0)
        found.append(row(WHAT, way, clients=clients, **values))
    return found


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Bounds for the paper's claims: training raises the throughput, and a token's latency remains about the same.

    On a CPU training does not raise the throughput, since a trained token costs the executor as much as a decoded one
    (record 0088); the bound is on what it costs.
    """
    ways = {each["way"]: each for each in rows if each["what"] == WHAT}
    if not ways:
        return []
    throughput = ways[MIXED]["tokens a second"] / ways[ALL]["tokens a second"]
    return [
        Goal("figure 23: tokens a second of inference and training beside inference only", throughput, 0.85, False),
        Goal("figure 23: latency of a token beside training, of inference only", ways[MIXED]["ratio"], 1.15, True),
        Goal(
            "latency of a token beside training in pieces, of that beside whole calls",
            ways[MIXED]["latency ms"] / ways[WHOLE]["latency ms"],
            1.0,
            True,
        ),
    ]
