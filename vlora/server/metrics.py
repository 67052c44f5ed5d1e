"""The server's metrics in Prometheus format. They contain no prompt, address or token secret."""

from __future__ import annotations

import functools
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlora.errors import error_codes
from vlora.types import AdapterStatus, EngineStats, Mode, Request, is_composed
from vlora.types.camera import CameraState, CameraStatus
from vlora.types.composition import BASE, COMPOSED, OTHER, UNKNOWN
from vlora.types.replicas import STATES, ClusterStatus
from vlora.types.training import TrainingState

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TIMES = {
    "request": (_REQUEST_S, "Arrival to last token or head result, of an answered request."),
    "request_queue": (_QUEUE_S, "Time that an answered request waited in the engine before its first step."),
    "time_to_first_token": (_FIRST_TOKEN_S, "Arrival to the first token or to the head result."),
    "time_per_output_token": (_TOKEN_S, "Time per token after the first, averaged over an answer."),
}
"""Histograms of each adapter's answers: buckets in seconds, and text."""

MAX_ADAPTERS = 64
MAX_TENANTS = 64
MAX_TRAININGS = 64
CAMERA_UP_S = 30.0  # a camera whose last frame is older is not up

_DECAY_EVERY = 4096  # requests
_CLEARLY = 2.0  # a name needs this many times the requests of a slot's name, so that similar names do not alternate

_OUTCOMES = ("ok", "cancelled", *error_codes())


class Metrics:
    """The front end's counters. The engine's counters are passed to each `render`.

    The label `adapter` has at most `MAX_ADAPTERS` adapter names plus `base`, `unknown`, `composed` and `other`;
    `tenant` has at most `MAX_TENANTS` plus `other` (see `LabelSlots`).
    """

    def __init__(self, model: str = "", version: str = "") -> None:
        self._registry = CollectorRegistry()
        self._begun: set[str] = set()  # label values of adapters with series
        self._adapters = LabelSlots(MAX_ADAPTERS, self._forget_adapter)
        self._tenants = LabelSlots(MAX_TENANTS, self._forget_tenant)
        Info("vlora_server", "Model and version of this server.", registry=self._registry).info(
            {"model": model, "version": version}
        )
        counter = functools.partial(Counter, registry=self._registry)
        gauge = functools.partial(Gauge, registry=self._registry)
        self._requests = counter(
            "vlora_requests",
            "Requests that ended, by adapter and outcome: ok, cancelled, or the code of the error they ended with.",
            ["adapter", "outcome"],
        )
        self.active = gauge("vlora_requests_active", "Requests in progress; each choice counts.")
        self._times = {
            name: Histogram(f"vlora_{name}_seconds", text, ["adapter"], buckets=buckets, registry=self._registry)
            for name, (buckets, text) in _TIMES.items()
        }
        self.streams = gauge("vlora_streams_open", "Open frame streams.")
        self.frames_taken = counter("vlora_frames_taken", "Frames that streams accepted.")
        self._frames = counter(
            "vlora_frames",
            "Frames that ended: answered; dropped for a newer frame; closed with their stream; or the error code.",
            ["outcome"],
        )
        self._frame_s = Histogram(
            "vlora_frame_seconds",
            "Arrival to answer of a frame, queueing included.",
            buckets=_REQUEST_S,
            registry=self._registry,
        )
        self._tokens = counter("vlora_tokens", "Tokens of answered requests.", ["adapter", "kind"])
        self._tenant_requests = counter(
            "vlora_tenant_requests", "Requests that ended, by token name.", ["tenant", "outcome"]
        )
        self._tenant_tokens = counter(
            "vlora_tenant_tokens", "Tokens of answered requests, by token name.", ["tenant", "kind"]
        )
        # A series that begins with its first event hides that increase, so each series exists from the start.
        for outcome in ("answered", "dropped", "closed", *error_codes()):
            self._frames.labels(outcome)
        for label in (BASE, UNKNOWN, COMPOSED, OTHER):
            self._begin_adapter(label)

    def register(self, collector: Collector) -> None:
        """Add metrics of another part of the server."""
        self._registry.register(collector)

    def expect(self, adapters: Iterable[str]) -> None:
        """Create the series of registered adapters at 0, while there are free slots."""
        for name in adapters:
            if name not in self._begun and self._adapters.reserve(name):
                self._begin_adapter(name)

    def count(self, outcome: str, adapter: str = UNKNOWN, tenant: str | None = None) -> None:
        """Count a request that ended. adapter: its name, a composition's, `BASE` or `UNKNOWN`."""
        self._requests.labels(self._adapter_label(adapter, counts=True), outcome).inc()
        if tenant is not None:
            self._tenant_requests.labels(self._tenants.label(tenant), outcome).inc()

    def frame_ended(self, outcome: str, latency_s: float | None = None) -> None:
        """Count a frame that ended. latency_s: of an answered frame."""
        self._frames.labels(outcome).inc()
        if latency_s is not None:
            self._frame_s.observe(latency_s)

    def answered(
        self, request: Request, *, total_s: float, first_s: float, queue_s: float, num_completion: int
    ) -> None:
        """Record an answer's times in the front end. num_completion is 0 for a head result."""
        label = self._adapter_label(request.adapter or BASE)
        times = {"request": total_s, "request_queue": queue_s, "time_to_first_token": first_s}
        if num_completion > 1:
            times["time_per_output_token"] = (total_s - first_s) / (num_completion - 1)
        for name, seconds in times.items():
            self._times[name].labels(label).observe(seconds)
        for kind, count in (("prompt", len(request.prompt_ids)), ("completion", num_completion)):
            self._tokens.labels(label, kind).inc(count)
            if request.tenant is not None:
                self._tenant_tokens.labels(self._tenants.current_label(request.tenant), kind).inc(count)

    def render(self, stats: EngineStats | None, adapters: Iterable[AdapterStatus] = ()) -> bytes:
        """Prometheus text format. stats: None when the engine is dead. adapters: the registered ones."""
        loads: Counts[str] = Counts()
        for status in adapters:
            loads[self._adapter_label(status.name)] += status.num_loads
        engine = CollectorRegistry()
        engine.register(Families(lambda: _engine(stats, loads)))
        return generate_latest(self._registry) + generate_latest(engine)

    def _adapter_label(self, adapter: str, *, counts: bool = False) -> str:
        if is_composed(adapter):
            return COMPOSED  # weights are free, so the names of compositions have no bound
        if adapter in (BASE, UNKNOWN):
            return adapter
        if not counts:
            return self._adapters.current_label(adapter)
        label = self._adapters.label(adapter)
        if label not in self._begun:
            self._begin_adapter(label)
        return label

    def _begin_adapter(self, label: str) -> None:
        self._begun.add(label)
        for outcome in _OUTCOMES:
            self._requests.labels(label, outcome)
        for kind in ("prompt", "completion"):
            self._tokens.labels(label, kind)
        for histogram in self._times.values():
            histogram.labels(label)

    def _forget_adapter(self, label: str) -> None:
        self._begun.discard(label)
        for metric in (self._requests, self._tokens, *self._times.values()):
            metric.remove_by_labels({"adapter": label})

    def _forget_tenant(self, label: str) -> None:
        self._tenant_requests.remove_by_labels({"tenant": label})
        self._tenant_tokens.remove_by_labels({"tenant": label})


class LabelSlots:
    """Names that have a slot keep their own series; all other names count as `other`.

    A slot moves to a name with clearly more recent requests than the least busy name with a slot, and the series
    of that name ends. So every series only increases, and the number of series is bounded.
    """

    def __init__(self, limit: int, on_evict: Callable[[str], None]) -> None:
        """on_evict: called with each name that loses its slot."""
        self._limit = limit
        self._on_evict = on_evict
        self._recent: dict[str, float] = {}  # decayed request counts, of names with and without a slot
        self._slots: set[str] = set()
        self._requests = 0

    def reserve(self, name: str) -> bool:
        """Give a name a slot if one is free. Returns whether the name has one."""
        if name not in self._slots and len(self._slots) < self._limit:
            self._slots.add(name)
        return name in self._slots

    def label(self, name: str) -> str:
        """The label value for one more request of this name."""
        self._count(name)
        if self.reserve(name):
            return name
        least = min(self._slots, key=lambda each: self._recent.get(each, 0.0))
        if self._recent[name] < _CLEARLY * (self._recent.get(least, 0.0) + 1):
            return OTHER
        self._slots.remove(least)
        self._on_evict(least)
        self._slots.add(name)
        return name

    def current_label(self, name: str) -> str:
        """The label value of a name, without counting a request."""
        return name if name in self._slots else OTHER

    def _count(self, name: str) -> None:
        self._recent[name] = self._recent.get(name, 0.0) + 1
        self._requests += 1
        if self._requests % _DECAY_EVERY == 0:
            halved = {each: count / 2 for each, count in self._recent.items()}
            self._recent = {each: count for each, count in halved.items() if count >= 0.5}


class Families(Collector):
    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, values: Any, label: str = ""
) -> Metric:
    """values: a number, or with a label a number by its values."""
    if not label:
        return kind(name, text, value=values)
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


_counter, _gauge = functools.partial(_family, CounterMetricFamily), functools.partial(_family, GaugeMetricFamily)


_NUMBERS = (
    (_counter, "num_restarts", "engine_restarts", "Engine processes that died and were replaced."),
    (
        _gauge,
        "highest_credit_s",
        "highest_credit_seconds",
        "Highest credit of a request: its waiting time plus the time of its next step.",
    ),
    (_counter, "num_switches", "switches", "Switches of the merged adapter."),
    (_counter, "switch_s", "switch_seconds", "Time spent switching."),
    (_counter, "num_preemptions", "preemptions", "Preempted requests: their KV blocks were freed and recomputed."),
    (_gauge, "cached_blocks", "prefix_cache_blocks", "Cached KV blocks that are not in use."),
    (_gauge, "host_adapter_bytes", "host_adapter_bytes", "Adapters in host memory."),
    (_counter, "relocated_bytes", "relocated_bytes", "Bytes copied within the arena by compaction."),
    (_counter, "load_wait_s", "load_wait_seconds", "Time that all requests waited for adapter loads."),
    (
        _counter,
        "num_encoded_patches",
        "encoded_patches",
        "Encoded image patches; large images are weighted above their patch count.",
    ),
    (_counter, "encode_s", "encode_seconds", "Time spent encoding images."),
    (_gauge, "vision_cache_bytes", "vision_cache_bytes", "Cached image embeddings."),
    (_gauge, "num_base_clients", "base_clients", "Clients of the base model."),
    (_counter, "num_base_calls", "base_calls", "Their calls that were answered."),
    (_counter, "num_base_rows", "base_rows", "Rows of products for them."),
    (_counter, "base_s", "base_seconds", "Time of the engine for them."),
)
"""Fields of `EngineStats` that are numbers; their metrics without `vlora_`, and the texts."""


def _engine(stats: EngineStats | None, loads: Mapping[str, int]) -> Iterator[Metric]:
    """stats: None when the engine is dead. loads: adapter loads to the device, by label value."""
    yield _gauge("vlora_engine_up", "1 while the engine is alive.", stats is not None)
    if stats is None:
        return
    for family, field, name, text in _NUMBERS:
        yield family(f"vlora_{name}", text, getattr(stats, field))
    queue = {
        "waiting": stats.num_waiting - stats.num_waiting_for_kv,
        "waiting_for_kv": stats.num_waiting_for_kv,
        "running": stats.num_running,
    }
    yield _gauge("vlora_queue_requests", "Requests in the engine.", queue, "state")
    none = {str(mode): 0 for mode in Mode}
    yield _counter("vlora_engine_steps", "Steps, by inference mode.", none | stats.steps_by_mode, "mode")
    modes = none | stats.requests_by_mode
    yield _counter(
        "vlora_engine_mode_requests", "Requests, counted once for each mode they ran a step in.", modes, "mode"
    )
    ended = {"finished": stats.num_finished, "failed": stats.num_failed, "cancelled": stats.num_cancelled}
    yield _counter("vlora_engine_requests", "Requests that ended in the engine.", ended, "outcome")
    saved = {"predicted": stats.saved_s, "measured": stats.measured_saved_s}
    gained = "Time that merged weights saved against unmerged steps; below 0: lost."
    yield _gauge("vlora_mode_saved_seconds", gained, saved, "basis")
    tokens = {"first": stats.num_needed_tokens, "again": stats.num_step_tokens - stats.num_needed_tokens}
    yield _counter(
        "vlora_engine_step_tokens",
        "Prompt and answer tokens computed by steps: for the first time, or again after a preemption.",
        tokens,
        "computed",
    )
    arena = {"kv": stats.kv_bytes, "cached": stats.cached_kv_bytes, "adapters": stats.adapter_bytes}
    arena["free"] = stats.arena_bytes - sum(arena.values())
    yield _gauge("vlora_arena_bytes", "The arena, by use.", arena, "use")
    adapters = {"registered": stats.num_adapters, "resident": stats.num_resident_adapters}
    yield _gauge("vlora_adapters", "Adapters, registered and on the device.", adapters, "state")
    prompts = {"computed": stats.num_computed_tokens, "reused": stats.num_reused_tokens}
    yield _counter(
        "vlora_engine_prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", prompts, "source"
    )
    lookups = {"hit": stats.num_adapter_hits, "miss": stats.num_adapter_misses}
    yield _counter(
        "vlora_adapter_requests", "Requests by whether their adapter was on the device at arrival.", lookups, "result"
    )
    # Loads without a named series, including those of unloaded adapters, count as other.
    named = {name: count for name, count in loads.items() if name != OTHER}
    named[OTHER] = stats.num_adapter_loads - sum(named.values())
    yield _counter("vlora_adapter_loads", "Loads of adapters to the device.", named, "adapter")
    looked_up = {"hit": stats.num_vision_hits, "miss": stats.num_vision_encoded}
    yield _counter("vlora_vision_cache", "Image lookups in the embedding cache.", looked_up, "result")
    states = {state: 0 for state in get_args(TrainingState)} | Counts(one.state for one in stats.trainings)
    yield _gauge("vlora_trainings", "Trainings since the engine's start.", states, "state")
    # The trainings before the last ones are only in the numbers by state.
    shown = stats.trainings[-MAX_TRAININGS:]
    steps, tokens = {one.name: one.step for one in shown}, {one.name: one.num_tokens for one in shown}
    yield _counter("vlora_training_steps", "Optimizer steps.", steps, "training")
    yield _counter("vlora_training_tokens", "Tokens of micro-steps, evaluations included.", tokens, "training")
    seconds = {one.name: one.seconds for one in shown}
    yield _counter("vlora_training_seconds", "Time of the engine for trainings.", seconds, "training")
    losses = {one.name: one.loss for one in shown if one.loss is not None}
    yield _gauge("vlora_training_loss", "Mean loss of the last optimizer step.", losses, "training")


def cluster_families(status: ClusterStatus) -> Iterator[Metric]:
    states = Counts(replica.state for replica in status.replicas)
    yield _gauge("vlora_replicas", "Replicas, by state.", {each: states[each] for each in STATES}, "state")
    for family, name, text, field in (
        (_gauge, "vlora_replica_requests", "Unfinished requests that were sent to a replica.", "num_requests"),
        (_gauge, "vlora_replica_failed_adapters", "Adapters that a replica cannot serve.", "num_failed_adapters"),
        (_counter, "vlora_shipped_bytes", "Bytes of adapters' files that were sent to a replica.", "num_shipped_bytes"),
    ):
        yield family(name, text, {each.name: getattr(each, field) for each in status.replicas}, "replica")
    yield _gauge("vlora_cluster_waiting", "Requests that wait for a replica with room.", status.num_waiting)
    yield _counter("vlora_replica_deaths", "Replicas that were lost while they served.", status.num_deaths)
    continued = "Requests that continued on another replica because theirs was lost."
    yield _counter("vlora_resubmitted", continued, status.num_resubmitted)
    yield _counter("vlora_moves", "Requests that were moved from a replica that serves.", status.num_moves)
    scaling = status.scaling
    if scaling is None:
        return
    yield _gauge("vlora_replicas_wanted", "Replicas that there should be.", scaling.number)
    automatic = "1 while the load decides on the number of replicas."
    yield _gauge("vlora_scaling_automatic", automatic, scaling.automatic)
    reasons = scaling.decisions
    yield _counter("vlora_scaling_decisions", "Changes of the number of replicas, by reason.", reasons, "reason")
    if scaling.decided_s is not None:
        last = "Time since the last of these changes."
        yield _gauge("vlora_scaling_last_decision_seconds", last, scaling.decided_s)


def camera_families(cameras: Iterable[CameraStatus]) -> Iterator[Metric]:
    found = {each.name: each for each in cameras}
    states = {state: 0 for state in get_args(CameraState)} | Counts(each.state for each in found.values())
    yield _gauge("vlora_cameras", "Cameras that the server reads, by state.", states, "state")
    read = {name: each.health for name, each in found.items() if each.state not in ("paused", "ended")}
    ages = {name: health.age_s for name, health in read.items() if health.age_s is not None}
    up = {name: each.connected and ages.get(name, CAMERA_UP_S) < CAMERA_UP_S for name, each in read.items()}
    rates = {name: health.fps for name, health in read.items()}
    yield _gauge("vlora_camera_up", "1 while frames arrive.", up, "camera")
    yield _gauge("vlora_camera_frame_age_seconds", "Time since the last frame.", ages, "camera")
    yield _gauge("vlora_camera_fps", "Frames per second, by the clock.", rates, "camera")
    for what in ("frames", "answers", "problems", "reconnects"):
        counts = {name: getattr(each.health, f"num_{what}") for name, each in found.items()}
        yield _counter(f"vlora_camera_{what}", f"Since the camera's process started: its {what}.", counts, "camera")
    events = {name: each.num_events for name, each in found.items()}
    yield _counter("vlora_camera_events", "Events of the camera's plan.", events, "camera")
