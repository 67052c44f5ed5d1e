"""Lazy iterators of arrivals: seeded workloads, each named after the setup in the paper that it follows, and recorded
traffic in the format of Microsoft's Azure LLM inference traces.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import heapq
import itertools
import math
import random
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlora.config import check_settings
from vlora.errors import BadConfig
from vlora.simulator.arrivals import Arrival, adapter_name, hottest, power_law, punica, tenant_name
from vlora.types import MAX_PRIORITY

_NUM_REQUESTS = 1000
PATTERNS = ("distinct", "uniform", "skewed", "identical")


def bounded(default: Any, **bounds: Any) -> Any:
    """A field that `check_settings` checks."""
    return dataclasses.field(default=default, metadata=bounds)


def _share(default: float) -> Any:
    return bounded(default, least=0, most=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompt and answer lengths in tokens, drawn uniformly between the bounds. `answer` 0 is a task head.

    images: per request, with `patches` patches each (`VisionInput.num_patches`); their tokens are included in the
    prompt's. hits: the share of images with cached embeddings. shown: the share of requests with images.
    prefixes: number of different beginnings of prompts, one of which each request has, drawn uniformly; they have
    `prefix_tokens` tokens, included in the prompt's. 0: prompts have nothing in common.
    """

    prompt_min: int = bounded(192, least=1)
    prompt_max: int = 320
    answer_min: int = bounded(16, least=0)
    answer_max: int = 112
    images: int = bounded(0, least=0)
    patches: int = bounded(256, least=1)
    hits: float = _share(0.0)
    shown: float = _share(1.0)
    prefixes: int = bounded(0, least=0)
    prefix_tokens: int = bounded(128, least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.prefixes and self.prefix_tokens >= self.prompt_min:
            raise BadConfig(f"prefix_tokens is {self.prefix_tokens}; it must be below prompt_min, {self.prompt_min}")
        if self.images > self.prompt_min:
            raise BadConfig(f"images is {self.images}; a prompt of {self.prompt_min} tokens is too short")
        for low, high in (("prompt_min", "prompt_max"), ("answer_min", "answer_max")):
            if getattr(self, low) > getattr(self, high):
                raise BadConfig(f"{low} ({getattr(self, low)}) is above {high} ({getattr(self, high)}); give both")

    def source(self, seed: int) -> Callable[[float, str, random.Random], Arrival]:
        """A function that makes an arrival at a time for an adapter, with lengths by the given draws.

        Images and prefixes are drawn separately: the other properties are the same with and without them.
        """
        pictures, prefixes = random.Random(f"images {seed}"), random.Random(f"prefixes {seed}")

        def arrival(time_s: float, adapter: str, draws: random.Random) -> Arrival:
            lengths = draws.randint(self.prompt_min, self.prompt_max), draws.randint(self.answer_min, self.answer_max)
            made = Arrival(time_s, adapter, *lengths, images=self._draw_images(pictures))
            if not self.prefixes:
                return made
            return made._replace(prefix=f"prefix-{prefixes.randrange(self.prefixes)}", prefix_tokens=self.prefix_tokens)

        return arrival

    def _draw_images(self, draws: random.Random) -> tuple[int, ...]:
        if not self.images or draws.random() >= self.shown:
            return ()
        return tuple(0 if draws.random() < self.hits else self.patches for _ in range(self.images))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gamma(Lengths):
    """Gamma arrivals for each adapter, with rates by a power law (S-LoRA section 7.2).

    rate: requests per second over all adapters. cv: coefficient of variation of the gaps. alpha: of the power law.
    """

    rate: float = bounded(2.0, least=1e-6)
    cv: float = bounded(1.0, least=1e-6)
    alpha: float = bounded(1.0, least=0)

    def arrivals(self, num_requests: int, num_adapters: int, seed: int) -> Iterator[Arrival]:
        draws = random.Random(seed)
        shape = self.cv**-2
        scales = [1 / (shape * self.rate * share) for share in power_law(num_adapters, self.alpha)]
        # Stationary from the start: time 0 is at a random point of a gap, and more likely in a long one.
        arrival = self.source(seed)
        next_up = [(draws.random() * draws.gammavariate(shape + 1, scale), i) for i, scale in enumerate(scales)]
        heapq.heapify(next_up)
        for _ in range(num_requests):
            now, i = next_up[0]
            yield arrival(now, adapter_name(i), draws)
            heapq.heapreplace(next_up, (now + draws.gammavariate(shape, scales[i]), i))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson(Lengths):
    """Poisson arrivals. rate: requests per second over all adapters."""

    rate: float = bounded(2.0, least=1e-6)

    def shares(self, num_requests: int, num_adapters: int) -> Sequence[float] | None:
        """Of the adapters, the hottest first; None: every request has its own adapter."""
        raise NotImplementedError

    def arrivals(self, num_requests: int, num_adapters: int, seed: int) -> Iterator[Arrival]:
        draws, arrival, now = random.Random(seed), self.source(seed), 0.0
        shares = self.shares(num_requests, num_adapters)
        sums = None if shares is None else list(itertools.accumulate(shares))
        for number in range(num_requests):
            now += draws.expovariate(self.rate)
            which = number if sums is None else draws.choices(range(len(sums)), cum_weights=sums)[0]
            yield arrival(now, adapter_name(which), draws)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hottest(Poisson):
    """One adapter has the share `skew`, the others share the rest evenly (V-LoRA section 6.3.3)."""

    skew: float = _share(0.6)

    def shares(self, num_requests: int, num_adapters: int) -> Sequence[float]:
        return hottest(num_adapters, self.skew)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Punica(Poisson):
    """One of Punica's popularity patterns (section 7), which also sets the number of adapters."""

    pattern: str = bounded("skewed", choices=PATTERNS)

    def shares(self, num_requests: int, num_adapters: int) -> Sequence[float] | None:
        return punica(self.pattern, num_requests)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video:
    """Streams of `fps` frames per second that each send a chunk when it is full (V-LoRA section 6.1: 30 frames, 1 s).

    `frames` frames of a chunk are used, each `frame_tokens` long, and answered by the stream's own task head. Stream i
    has adapter i modulo their number. answer: tokens of a text answer, 0 for a head. patches: of a frame
    (`VisionInput.num_patches`); hits: the share of frames with cached embeddings.
    """

    streams: int = bounded(3, least=1)
    fps: int = bounded(30, least=1)
    chunk: int = bounded(30, least=1)
    frames: int = bounded(6, least=1)
    frame_tokens: int = bounded(256, least=1)
    answer: int = bounded(0, least=0)
    patches: int = bounded(1024, least=0)
    hits: float = _share(0.0)

    def __post_init__(self) -> None:
        check_settings(self)

    def arrivals(self, num_requests: int, num_adapters: int, seed: int) -> Iterator[Arrival]:
        draws, pictures = random.Random(seed), random.Random(f"images {seed}")
        period_s = self.chunk / self.fps
        starts = sorted((draws.uniform(0, period_s), stream) for stream in range(self.streams))
        chunks = ((start + turn * period_s, stream) for turn in itertools.count() for start, stream in starts)
        for now, stream in itertools.islice(chunks, num_requests):
            images = tuple(0 if pictures.random() < self.hits else self.patches for _ in range(self.frames))
            prompt = self.frames * self.frame_tokens
            yield Arrival(now, adapter_name(stream % num_adapters), prompt, self.answer, images=images)


Workload = Gamma | Hottest | Punica | Video
WORKLOADS: dict[str, type[Workload]] = {"gamma": Gamma, "hottest": Hottest, "punica": Punica, "video": Video}


def make_workload(text: str) -> Workload:
    """The workload for `NAME` or `NAME:key=value,...`. Raises BadConfig, listing the known names."""
    name, _, rest = text.partition(":")
    if name not in WORKLOADS:
        raise BadConfig(f"no workload named {name!r}; choose one of {', '.join(WORKLOADS)}, or give a CSV file")
    kinds = typing.get_type_hints(WORKLOADS[name])
    settings: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in kinds:
            raise BadConfig(
                f"workload {name!r} has no setting {pair!r}; write KEY=VALUE with one of {', '.join(kinds)}"
            )
        if kinds[key] is not str:
            _number(value, key)
        try:
            settings[key] = kinds[key](value)
        except ValueError:
            raise BadConfig(f"{key} is {value!r}; it must be a whole number") from None
    return WORKLOADS[name](**settings)


def is_file(trace: str) -> bool:
    """Whether a trace is a file's name, not a workload."""
    return trace.lower().endswith(".csv") or Path(trace).is_file()


def arrivals_of(trace: str, num_adapters: int, num_requests: int | None, seed: int) -> Iterator[Arrival]:
    """At most so many arrivals of a CSV file or a workload; by default all of a file, and 1,000 of a workload.

    Raises:
        BadConfig: No workload has this name, or the file is invalid.
    """
    if is_file(trace):
        return itertools.islice(read_trace(Path(trace), num_adapters, seed), num_requests)
    return make_workload(trace).arrivals(num_requests or _NUM_REQUESTS, num_adapters, seed)


def among_tenants(arrivals: Iterable[Arrival], num_tenants: int, seed: int) -> Iterator[Arrival]:
    """Assign a tenant, drawn from a power law with exponent 1, to each arrival without one."""
    draws = random.Random(f"tenants {seed}")  # separate draws, so that tenants do not change the other properties
    sums = list(itertools.accumulate(power_law(num_tenants, 1.0)))
    for arrival in arrivals:
        drawn = draws.choices(range(num_tenants), cum_weights=sums)[0]
        yield arrival if arrival.tenant is not None else arrival._replace(tenant=tenant_name(drawn))


TIME, PROMPT, ANSWER, ADAPTER = "TIMESTAMP", "ContextTokens", "GeneratedTokens", "Adapter"
BOUND, PRIORITY, TENANT = "MaxTTFT", "Priority", "Tenant"


def read_trace(path: Path, num_adapters: int, seed: int) -> Iterator[Arrival]:
    """Arrivals of a CSV file, lazily, with times relative to its first row.

    Required columns: TIMESTAMP (seconds, or a date and time), ContextTokens, GeneratedTokens (0: a task head). Optional
    columns: Adapter (empty: the base model), MaxTTFT (seconds; empty: no bound), Priority (empty: 0) and Tenant (empty:
    none). Without the column Adapter, adapters are drawn from a power law with exponent 1. Rows must be in order of
    time.

    Raises BadConfig with line and field for invalid input.
    """
    sums = list(itertools.accumulate(power_law(num_adapters, 1.0)))
    draws = random.Random(seed)
    try:
        file = path.open(newline="")
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    with file:
        rows = csv.DictReader(file)
        missing = [name for name in (TIME, PROMPT, ANSWER) if name not in (rows.fieldnames or ())]
        if missing:
            raise BadConfig(f"{path}, line 1: no column {', '.join(missing)}; found {', '.join(rows.fieldnames or ())}")
        named = ADAPTER in (rows.fieldnames or ())
        first: float | None = None
        last = -math.inf
        for row in rows:
            where = f"{path}, line {rows.line_num}, field "
            now = _seconds(row[TIME], where + TIME)
            if now < last:
                raise BadConfig(f"{where}{TIME}: {row[TIME]!r} is earlier than the previous row; sort the file by time")
            first, last = now if first is None else first, now
            if named:
                adapter = row[ADAPTER] or None
            else:
                adapter = adapter_name(draws.choices(range(num_adapters), cum_weights=sums)[0])
            prompt, answer = _count(row[PROMPT], 1, where + PROMPT), _count(row[ANSWER], 0, where + ANSWER)
            if answer == 0 and adapter is None:
                raise BadConfig(f"{where}{ANSWER}: 0 requests a task head, but the base model has none")
            bound = _number(row[BOUND], where + BOUND) if row.get(BOUND) else None
            priority = _number(row[PRIORITY], where + PRIORITY) if row.get(PRIORITY) else 0
            if bound is not None and bound <= 0:
                raise BadConfig(f"{where}{BOUND}: {row[BOUND]!r} is not above 0; leave it empty for no bound")
            if priority != int(priority) or abs(priority) > MAX_PRIORITY:
                raise BadConfig(
                    f"{where}{PRIORITY}: {row[PRIORITY]!r} is not a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
                )
            yield Arrival(now - first, adapter, prompt, answer, bound, int(priority), row.get(TENANT) or None)


def _seconds(text: str | None, where: str) -> float:
    try:
        return _number(text, where)
    except BadConfig:
        pass
    try:
        # The published traces have seven decimal digits of a second, one more than Python parses.
        whole, dot, fraction = (text or "").partition(".")
        moment = datetime.datetime.fromisoformat(whole + dot + fraction[:6])
    except ValueError:
        raise BadConfig(f"{where}: {text!r} is neither seconds nor a date and time") from None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


def _number(text: str | None, name: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadConfig(f"{name} is {text!r}; it must be a number")
    return value


def _count(text: str | None, least: int, name: str) -> int:
    if text is None or not text.strip().isdecimal() or int(text) < least:
        raise BadConfig(f"{name}: {text!r} is not a whole number of {least} or more")
    return int(text)
