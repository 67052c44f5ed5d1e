"""V-LoRA's figures of serving: schedulers and systems by request rate, skewness, adapters and replicas (6.2 to 6.4)."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measured.machine_costs import machine_costs, switch_times
from vlora.bench.paper.measured.systems import (
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
from vlora.bench.paper.measuring import Measuring
from vlora.bench.report import Goal
from vlora.bench.scheduling.policy_workers import NUM_ADAPTERS
from vlora.simulator import Arrival, ClusterConfig, ReplicaConfig, replay
from vlora.simulator.popularity import hottest
from vlora.simulator.workloads import Hottest

_SHOWN = (OURS, ALGORITHM1, UNMERGED, DLORA)
_LOAD = 0.9  # of the capacity of unmerged-only with full batches
# Requests of figure 14 on the engine. One thread of a CPU takes 10 to 40 s for each.
_NUM_RETRIEVALS, _NUM_CHUNKS = 8, 4
_BATCHING = "6.2: V-LoRA reduces average token latency compared to dLoRA, Punica and S-LoRA, respectively"


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
            measured = measuring.once(key, measure, inputs=("costs",))  # by the rates of arrivals
            simulated = on_simulator(measuring, known[name], its)
            found["engine"].setdefault(app, {})[name] = {"measured": measured, "simulated": simulated}
    found["engine load"] = _LOAD
    found["loads"] = list(loads)
    return found


def _draw_rates(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3, (1, 1, 1.25))
    place = found["loads"].index(found["engine load"])
    for axis, app, title in ((left, "retrieval", "visual retrieval"), (middle, "video", "video analytics")):
        across = found[app]["rates"]
        drawing.lines(
            axis, found[app]["ms"], across, title=title, xlabel="requests/s", ylabel="average token latency, ms"
        )
        points = found["engine"][app]
        longer = [f"{each['measured']['busy s'] / each['simulated']['busy s']:.2f}" for each in points.values()]
        labels = {"measured": f"engine: {' and '.join(longer)} of the seconds", "simulated": "simulator, same requests"}
        for number, (name, point) in enumerate(points.items()):
            color = drawing.LINES[_SHOWN.index(name)]
            for kind, fill in (("measured", color), ("simulated", "none")):
                axis.plot(
                    across[place], point[kind]["ms"], "*", color=color, markerfacecolor=fill, markersize=12, zorder=5,
                    label=labels[kind] if number == 0 else None,
                )  # fmt: skip
        axis.set_yscale("log")
        axis.set_ylim(top=8 * axis.get_ylim()[1])  # room for the legend
        drawing.log_values(axis)
        axis.legend(fontsize=7, loc="upper left")
    drawing.beside(right, _RATE_FACTS, _rates_here(found), ylabel="% lower average token latency")
    right.tick_params(axis="x", labelsize=6)


_RATE_FACTS = tuple(
    Fact(f"{app}, than {system}", value, "%", _BATCHING)
    for app, values in (("retrieval", (72, 50, 20)), ("video", (89, 83, 71)))
    for system, value in zip(("dLoRA", "Punica", "S-LoRA"), values, strict=True)
)


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


def _draw_skews(found: Found, canvas: Any, facts: Sequence[Fact], here: Mapping[str, float | None]) -> None:
    left, right = drawing.panels(canvas, 2)
    groups = [f"{100 * skew:g}%" for skew in found["skews"]]
    drawing.bars(left, groups, found["ms"], xlabel="share of the hottest adapter", ylabel="average token latency, ms")
    left.set_yscale("log")  # dLoRA's may be tens of times the others'
    left.set_ylim(top=6 * left.get_ylim()[1])  # room for the legend
    drawing.log_values(left)
    left.legend(fontsize=7, loc="upper left", ncols=2)
    drawing.beside(right, facts, here, ylabel="% lower average token latency")


_SCHEDULER_FACTS = tuple(
    Fact(f"than {name}", value, "%", "6.3.3: V-LoRA outperforms merge only, unmerge only and dLoRA under skewness")
    for name, value in (("merged only", 33), ("unmerged only", 59), ("dLoRA", 21))
)


def _schedulers_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    names = {"merged only": MERGED, "unmerged only": UNMERGED, "dLoRA": DLORA}
    return {f"than {name}": _less(ms[OURS], ms[system]) for name, system in names.items()}


def _scheduler_goals(found: Found) -> list[Goal]:
    return [
        Goal(f"fig19: latency here / {name}, mean of skews", _ratio(found["ms"], name), 1.0, True)
        for name in (UNMERGED, DLORA)
    ]


_SKEW_FACTS = tuple(
    Fact(f"than {name}, {end}", value, "%", "6.4: reduction of 76-81 %, 72-83 %, 63-76 % under four skewnesses")
    for name, low, high in (("dLoRA", 76, 81), ("Punica", 72, 83), ("S-LoRA", 63, 76))
    for end, value in (("least", low), ("most", high))
)


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


def _draw_adapters(found: Found, canvas: Any) -> None:
    (axis,) = drawing.panels(canvas, 1)
    drawing.lines(axis, found["ms"], found["adapters"], xlabel="adapters", ylabel="average token latency, ms")
    drawing.ticks(axis, found["adapters"])
    axis.set_yscale("log")
    axis.set_ylim(bottom=axis.get_ylim()[0] / 2, top=4 * axis.get_ylim()[1])  # room for the words
    drawing.log_values(axis)
    axis.axvline(32, color="#999", linestyle=":")
    axis.text(32, axis.get_ylim()[0] * 1.1, " memory holds 32", fontsize=8, color="#666")


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


_SWITCH_FACTS = (
    Fact("than dLoRA", 1.2, "x", "6.3.3: 1.2x and 1.4x speed-up compared to dLoRA and unmerge, two adapters"),
    Fact("than unmerged only", 1.4, "x", "6.3.3: 1.2x and 1.4x speed-up compared to dLoRA and unmerge, two adapters"),
)


def _switching_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    return {"than dLoRA": ms[DLORA] / ms[OURS], "than unmerged only": ms[UNMERGED] / ms[OURS]}


def _draw_switching(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (1.5, 1))
    names = list(found["ms"])
    at = range(len(names))
    drawn = left.barh(at, list(found["ms"].values()), color=[drawing.LINES[i] for i in at])
    labels = [f"{found['ms'][name]:.2f} ms, {found['switches'][name]} switches" for name in names]
    left.bar_label(drawn, labels, fontsize=8, padding=3)
    left.set_yticks(at, names, fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="average token latency, ms", xlim=(0, 1.45 * max(found["ms"].values())))
    left.grid(alpha=0.3, axis="x")
    drawing.beside(right, _SWITCH_FACTS, _switching_here(found), ylabel="speed-up")


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


_REPLICA_FACTS = tuple(
    Fact(f"throughput of {number} / 1", value, "x", "Table 3: 6.07, 11.48 and 23.97 req/s on 1, 2 and 4 A100")
    for number, value in ((2, 11.48 / 6.07), (4, 23.97 / 6.07))
)


def _replicas_here(found: Found) -> dict[str, float | None]:
    rates = found["requests/s"]
    return {f"throughput of {n} / 1": rates[i] / rates[0] for i, n in enumerate(found["replicas"]) if n > 1}


def _draw_replicas(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    drawing.bars(
        left, [str(n) for n in found["replicas"]], {"here": found["requests/s"]}, xlabel="replicas", ylabel="requests/s"
    )
    drawing.beside(right, _REPLICA_FACTS, _replicas_here(found), ylabel="relative to one")


_SYSTEMS = (
    "dLoRA is its policy with a padded einsum and PEFT's switch, both as measured here, in the faster of bfloat16 and "
    "float32; S-LoRA and Punica are unmerged-only with this project's operator, which favours them."
)

FIGURES = (
    Figure(
        paper="v-lora",
        number="fig14",
        minutes=33,
        title="average token latency by request rate, two applications",
        states="V-LoRA has the lowest average token latency for both applications on three models; the text compares "
        "per application, and attributes the figures to the systems in this order.",
        caption="Retrieval: prompts of 192-320 and answers of 150-250 tokens, hottest adapter 60 %, 8 adapters; video: "
        "chunks of frames with their encoding, a head here and 8 tokens elsewhere. Stars: the engine itself at 90 % of "
        "capacity, with the first requests of the same traffic, and hollow the simulator with as many. So near to "
        "capacity, steps that take a little longer than their fitted costs multiply the latency: the legend has the "
        "engine's seconds with requests over the simulator's, by policy. One model "
        f"instead of three. {_SYSTEMS}",
        measure=_measure_rates,
        draw=_draw_rates,
        facts=_RATE_FACTS,
        here=_rates_here,
        goals=_rate_goals,
        simulated=True,
        size=(14.5, 4.8),
        revision=2,
    ),
    Figure(
        paper="v-lora",
        number="fig19",
        title="schedulers by skewness",
        states="V-LoRA's scheduler has the lowest latency under every skewness.",
        caption=f"Retrieval at 90 % of capacity, 20 adapters. Merged-only lets others wait without bound. {_SYSTEMS}",
        measure=_shared_skews,
        draw=lambda found, canvas: _draw_skews(found, canvas, _SCHEDULER_FACTS, _schedulers_here(found)),
        facts=_SCHEDULER_FACTS,
        here=_schedulers_here,
        goals=_scheduler_goals,
        simulated=True,
        size=(13.0, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="fig21",
        title="benefit of a swift switch, two adapters",
        states="With two adapters, the swift switch makes V-LoRA faster than dLoRA and than unmerged inference.",
        caption="Retrieval at 90 % of capacity with two adapters. The last bar is the paper's Algorithm 1 with PEFT's "
        f"way to switch, which isolates the switch. {_SYSTEMS}",
        measure=_measure_switching,
        draw=_draw_switching,
        facts=_SWITCH_FACTS,
        here=_switching_here,
        simulated=True,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="v-lora",
        number="fig22",
        title="systems by skewness",
        states="V-LoRA reduces latency against all systems under four skewnesses.",
        caption=f"The replays of figure 19, against systems instead of schedulers: retrieval at 90 % of capacity, "
        f"20 adapters. {_SYSTEMS}",
        measure=_shared_skews,
        draw=lambda found, canvas: _draw_skews(found, canvas, _SKEW_FACTS, _skews_here(found)),
        facts=_SKEW_FACTS,
        here=_skews_here,
        simulated=True,
        size=(13.0, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="fig23",
        title="number of adapters",
        states="V-LoRA suffers the least from more adapters, also when they must be swapped (no numbers in the text).",
        caption="Retrieval at a fixed rate, hottest adapter 60 %; memory holds 32 adapters, others are loaded beside "
        f"the steps. {_SYSTEMS}",
        measure=_measure_adapters,
        draw=_draw_adapters,
        simulated=True,
        size=(8.5, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="table3",
        title="throughput of several machines",
        states="Throughput grows with the number of GPUs: 6.07, 11.48 and 23.97 requests per second on 1, 2 and 4.",
        caption="Replicas of this machine that share twice their capacity, each request to the least loaded one; the "
        "paper's are GPUs of one server.",
        measure=_measure_replicas,
        draw=_draw_replicas,
        facts=_REPLICA_FACTS,
        here=_replicas_here,
        simulated=True,
        size=(10.0, 4.2),
    ),
)
