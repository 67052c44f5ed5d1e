"""V-LoRA's figures of serving: schedulers and systems by request rate, skewness, adapters and replicas (6.2 to 6.4)."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measured.machine_costs import machine_costs, switch_times
from benchmarks.paper.measured.systems import (
    ALGORITHM1,
    ANSWER,
    DLORA,
    MERGED,
    OURS,
    PROMPT,
    RETRIEVAL,
    UNMERGED,
    capacity,
    chunks,
    latency_ms,
    on_engine,
    on_simulator,
    replayed,
    systems,
    video,
)
from benchmarks.paper.measuring import Measuring
from benchmarks.policy_workers import NUM_ADAPTERS
from vlora.bench.plots import COLORS
from vlora.bench.report import Goal
from vlora.simulator import Arrival, ClusterConfig, ReplicaConfig, replay
from vlora.simulator.popularity import hottest
from vlora.simulator.workloads import Hottest

_SHOWN = (OURS, ALGORITHM1, UNMERGED, DLORA)
_LOAD = 0.9  # of the capacity of unmerged-only with full batches
# Requests of figure 14 on the engine. One thread of a CPU takes 10 to 40 s for each.
_NUM_RETRIEVALS, _NUM_CHUNKS = 8, 4


def num_requests(quick: bool) -> int:
    return 80 if quick else 250


def _retrieval(measuring: Measuring, load: float, skew: float, num_adapters: int) -> tuple[float, list[Arrival]]:
    """Requests per second, and the arrivals."""
    rate = load * capacity(measuring, PROMPT, ANSWER, hottest(num_adapters, skew))
    number = num_requests(measuring.setting.quick)
    return rate, list(Hottest(rate=rate, skew=skew, **RETRIEVAL).arrivals(number, num_adapters, seed=0))


def _less(own: Sequence[float], other: Sequence[float]) -> float:
    """By how many per cent `own` is lower, on average."""
    return 100 * (1 - statistics.fmean(a / b for a, b in zip(own, other, strict=True)))


# -- Figure 14 --------------------------------------------------------------------------------------------------------


def _measure_rates(measuring: Measuring) -> dict[str, Any]:
    quick = measuring.setting.quick
    loads = (0.3, 0.6, _LOAD, 1.2) if quick else (0.2, 0.4, 0.6, 0.8, _LOAD, 1.0, 1.2)
    known = systems(measuring)
    workload = video(quick)
    prompt = workload.frames * (workload.frame_tokens + 1)
    full = capacity(measuring, prompt, 8, [1 / NUM_ADAPTERS] * NUM_ADAPTERS)
    costs, _ = machine_costs(measuring)
    # Encoding is added, because it takes most of a chunk's time.
    full = 1 / (1 / full + workload.frames * workload.patches * costs.patch_s)
    found: dict[str, Any] = {"retrieval": {"rates": [], "ms": {}}, "video": {"rates": [], "ms": {}}, "engine": {}}
    for load in loads:
        rate, arrivals = _retrieval(measuring, load, 0.6, NUM_ADAPTERS)
        found["retrieval"]["rates"].append(rate)
        found["video"]["rates"].append(load * full)
        for name in _SHOWN:
            clips = chunks(workload, num_requests(quick), NUM_ADAPTERS, load * full, known[name].heads)
            for app, its in (("retrieval", arrivals), ("video", clips)):
                found[app]["ms"].setdefault(name, []).append(latency_ms(measuring, known[name], its))
    for name in (OURS, UNMERGED):
        policy, heads = known[name].policy, known[name].heads
        _, arrivals = _retrieval(measuring, _LOAD, 0.6, NUM_ADAPTERS)
        clips = chunks(workload, _NUM_CHUNKS, NUM_ADAPTERS, _LOAD * full, heads)
        for app, its in (("retrieval", arrivals[:_NUM_RETRIEVALS]), ("video", clips)):
            measure = functools.partial(on_engine, measuring, policy, its, round(workload.patches**0.5))
            key = f"engine-{app}-{policy}-{len(its)}"
            measured = measuring.once(key, measure)
            simulated = on_simulator(measuring, known[name], its)
            found["engine"].setdefault(app, {})[name] = {"measured": measured, "simulated": simulated}
    found["engine load"] = _LOAD
    found["loads"] = list(loads)
    return found


def _rate_panels(found: Found) -> list[Panel]:
    return [
        functools.partial(_draw_rates, found, app, title)
        for app, title in (("retrieval", "visual retrieval"), ("video", "video analytics"))
    ]


def _draw_rates(found: Found, app: str, title: str, axis: Any) -> None:
    across, points = found[app]["rates"], found["engine"][app]
    place = found["loads"].index(found["engine load"])
    label = "average token latency, ms"
    drawing.lines(found[app]["ms"], across, title=title, xlabel="requests/s", ylabel=label)(axis)
    longer = [f"{each['measured']['busy s'] / each['simulated']['busy s']:.2f}" for each in points.values()]
    labels: dict[str, Any] = {
        "measured": f"engine: {' and '.join(longer)} of the seconds",
        "simulated": "simulator, same requests",
    }
    for number, (name, point) in enumerate(points.items()):
        color = COLORS[_SHOWN.index(name)]
        for kind, fill in (("measured", color), ("simulated", "none")):
            axis.plot(
                across[place], point[kind]["ms"], "*", color=color, markerfacecolor=fill, markersize=12, zorder=5,
                label=labels[kind] if number == 0 else None,
            )  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(top=8 * axis.get_ylim()[1])  # room for the legend
    drawing.log_values(axis)
    axis.legend(fontsize=7, loc="upper left")


def _rates_here(found: Found) -> dict[str, float | None]:
    here: dict[str, float | None] = {}
    for app in ("retrieval", "video"):
        ms = found[app]["ms"]
        for system, name in (("dLoRA", DLORA), ("Punica", UNMERGED), ("S-LoRA", UNMERGED)):
            here[f"{app}, than {system}"] = _less(ms[OURS], ms[name])
    return here


def _rate_goals(found: Found) -> list[Goal]:
    return [
        Goal(f"fig14: {app}: latency here / {name}, mean of rates", _ratio(found[app]["ms"], name), 1.0, True)
        for app in ("retrieval", "video")
        for name in (UNMERGED, DLORA)
    ]


def _ratio(ms: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.fmean(a / b for a, b in zip(ms[OURS], ms[name], strict=True))


# -- Figures 19, 22 and 23 --------------------------------------------------------------------------------------------


def _measure_skews(measuring: Measuring) -> dict[str, Any]:
    skews = (0.2, 0.4, 0.6, 0.8) if measuring.setting.quick else (0.2, 0.4, 0.6, 0.8, 0.95)
    ms: dict[str, list[float]] = {}
    for skew in skews:
        _, arrivals = _retrieval(measuring, _LOAD, skew, 20)
        for name, system in systems(measuring).items():
            ms.setdefault(name, []).append(latency_ms(measuring, system, arrivals))
    return {"skews": list(skews), "ms": ms}


def _shared_skews(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("skews", lambda: _measure_skews(measuring))
    return found


def _skew_panels(found: Found) -> list[Panel]:
    groups = [f"{100 * skew:g}%" for skew in found["skews"]]
    labels: dict[str, Any] = {"xlabel": "share of the hottest adapter", "ylabel": "average token latency, ms"}
    legend = {"fontsize": 7, "loc": "upper left", "ncols": 2}
    return [drawing.bars(groups, found["ms"], log=6, legend=legend, **labels)]


def _schedulers_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    names = {"merged only": MERGED, "unmerged only": UNMERGED, "dLoRA": DLORA}
    return {f"than {name}": _less(ms[OURS], ms[system]) for name, system in names.items()}


def _scheduler_goals(found: Found) -> list[Goal]:
    return [
        Goal(f"fig19: latency here / {name}, mean of skews", _ratio(found["ms"], name), 1.0, True)
        for name in (UNMERGED, DLORA)
    ]


def _skews_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    here: dict[str, float | None] = {}
    for name, system in (("dLoRA", DLORA), ("Punica", UNMERGED), ("S-LoRA", UNMERGED)):
        less = [_less([a], [b]) for a, b in zip(ms[OURS], ms[system], strict=True)]
        here |= {f"than {name}, least": min(less), f"than {name}, most": max(less)}
    return here


def _measure_adapters(measuring: Measuring) -> dict[str, Any]:
    numbers = (2, 10, 50, 200) if measuring.setting.quick else (2, 10, 20, 50, 100, 200)
    rate, _ = _retrieval(measuring, 0.8, 0.6, max(numbers))
    ms: dict[str, list[float]] = {}
    for number in numbers:
        workload = Hottest(rate=rate, skew=0.6, **RETRIEVAL)
        arrivals = list(workload.arrivals(num_requests(measuring.setting.quick), number, seed=0))
        for name in _SHOWN:
            ms.setdefault(name, []).append(
                latency_ms(measuring, systems(measuring)[name], arrivals, resident_adapters=32)
            )
    return {"adapters": list(numbers), "rate": rate, "ms": ms}


def _adapter_panels(found: Found) -> list[Panel]:
    def draw(axis: Any) -> None:
        labels: dict[str, Any] = {"xlabel": "adapters", "ylabel": "average token latency, ms"}
        drawing.lines(found["ms"], found["adapters"], ticked=True, log=True, **labels)(axis)
        axis.set_ylim(bottom=axis.get_ylim()[0] / 2, top=4 * axis.get_ylim()[1])  # room for the words
        axis.axvline(32, color="#999", linestyle=":")
        axis.text(32, axis.get_ylim()[0] * 1.1, " memory holds 32", fontsize=8, color="#666")

    return [draw]


# -- Figure 21, table 3 -----------------------------------------------------------------------------------------------


def _measure_switching(measuring: Measuring) -> dict[str, Any]:
    known = systems(measuring)
    _, arrivals = _retrieval(measuring, _LOAD, 0.6, 2)
    slow = known[DLORA].costs
    slower = known[ALGORITHM1].costs._replace(merge_s=slow.merge_s, back_s=slow.back_s)
    runs = {name: known[name] for name in (OURS, ALGORITHM1, UNMERGED, DLORA)}
    runs["Algorithm 1, PEFT's switch"] = type(known[DLORA])("algorithm1", slower)
    ms, switches = {}, {}
    for name, system in runs.items():
        measures = replayed(measuring, system, arrivals)
        ms[name] = 1e3 * measures.average_token_latency_s
        switches[name] = measures.as_dict()["switches"]
    return {"ms": ms, "switches": switches, "switch ms": switch_times(measuring)}


def _switching_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    return {"than dLoRA": ms[DLORA] / ms[OURS], "than unmerged only": ms[UNMERGED] / ms[OURS]}


def _switching_panels(found: Found) -> list[Panel]:
    def draw(axis: Any) -> None:
        ms = found["ms"]
        labels = [f"{ms[name]:.2f} ms, {found['switches'][name]} switches" for name in ms]
        drawing.horizontal_bars(axis, ms, labels, COLORS[: len(ms)])
        axis.set(xlabel="average token latency, ms", xlim=(0, 1.45 * max(ms.values())))
        axis.grid(alpha=0.3, axis="x")

    return [draw]


def _measure_replicas(measuring: Measuring) -> dict[str, Any]:
    costs, load_s = machine_costs(measuring)
    found: dict[str, Any] = {"replicas": [1, 2, 4], "requests/s": []}
    single = capacity(measuring, PROMPT, ANSWER, hottest(20, 0.6))
    for number in found["replicas"]:
        workload = Hottest(rate=2.0 * number * single, skew=0.6, **RETRIEVAL)
        arrivals = workload.arrivals(num_requests(measuring.setting.quick) * 2 * number, 20, seed=0)
        measures = replay(arrivals, ReplicaConfig(costs=costs, load_s=load_s), ClusterConfig(replicas=number))
        found["requests/s"].append(measures.as_dict()["requests_per_s"])
    return found


def _replicas_here(found: Found) -> dict[str, float | None]:
    rates = found["requests/s"]
    return {f"throughput of {n} / 1": rates[i] / rates[0] for i, n in enumerate(found["replicas"]) if n > 1}


def _replica_panels(found: Found) -> list[Panel]:
    groups = [str(number) for number in found["replicas"]]
    return [drawing.bars(groups, {"here": found["requests/s"]}, xlabel="replicas", ylabel="requests/s")]


CODE = {
    "v-lora:fig14": Code(_measure_rates, _rate_panels, _rates_here, _rate_goals),
    "v-lora:fig19": Code(_shared_skews, _skew_panels, _schedulers_here, _scheduler_goals),
    "v-lora:fig21": Code(_measure_switching, _switching_panels, _switching_here),
    "v-lora:fig22": Code(_shared_skews, _skew_panels, _skews_here),
    "v-lora:fig23": Code(_measure_adapters, _adapter_panels),
    "v-lora:table3": Code(_measure_replicas, _replica_panels, _replicas_here),
}
