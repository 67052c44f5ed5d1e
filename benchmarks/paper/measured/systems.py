"""The serving systems of the papers as policies, costs and answers of the simulator, and the same traffic on the
engine.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.measured.machine_costs import dlora_costs, machine_costs
from benchmarks.paper.measuring import RANK, Measuring
from benchmarks.policy import full_batch_capacity
from benchmarks.policy_workers import Worker, average_token_latency_ms, drive
from vlora.orchestrator import Costs
from vlora.simulator import Arrival, Measures, ReplicaConfig, replay
from vlora.simulator.workloads import Video

OURS, ALGORITHM1 = "cost_based (default here)", "Algorithm 1 (V-LoRA)"
MERGED, UNMERGED = "merged only", "unmerged only (S-LoRA, Punica)"
DLORA = "dLoRA (its operator and switch)"

PROMPT, ANSWER = 256, 200
RETRIEVAL = {"prompt_min": 192, "prompt_max": 320, "answer_min": 150, "answer_max": 250}
"""Visual retrieval (V-LoRA 6.2): a prompt of about 256 tokens, an answer of about 200."""

WORDS = 8
"""Tokens of an answer in words to video analytics, where the paper's take 5 to 10 (V-LoRA 6.2)."""


@dataclasses.dataclass(frozen=True)
class System:
    """A serving system.

    Attributes:
        policy: The policy's name.
        costs: Of the machine with its operator and its switch.
        heads: Whether it has task heads.
    """

    policy: str
    costs: Costs
    heads: bool = False


def systems(measuring: Measuring) -> dict[str, System]:
    """All systems by name. S-LoRA and Punica have this project's operator, which favours them on a CPU, where their
    kernels do not exist.
    """
    costs, _ = machine_costs(measuring)
    return {
        OURS: System("cost_based", costs, heads=True),
        ALGORITHM1: System("algorithm1", costs, heads=True),
        MERGED: System("merged_only", costs),
        UNMERGED: System("unmerged_only", costs),
        DLORA: System("dlora", dlora_costs(measuring)),
    }


def replayed(measuring: Measuring, system: System, arrivals: Sequence[Arrival], **settings: Any) -> Measures:
    """The measures of a replay on one replica."""
    _, load_s = machine_costs(measuring)
    return replay(arrivals, ReplicaConfig(costs=system.costs, load_s=load_s, policy=system.policy, **settings))


def latency_ms(measuring: Measuring, system: System, arrivals: Sequence[Arrival], **settings: Any) -> float:
    """Average token latency (V-LoRA 6.1) of a replay on one replica."""
    return 1e3 * replayed(measuring, system, arrivals, **settings).average_token_latency_s


def on_simulator(measuring: Measuring, system: System, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """As `on_engine`, of a replay on one replica."""
    measures = replayed(measuring, system, arrivals)
    return {"ms": 1e3 * measures.average_token_latency_s, "busy s": measures.active_s}


def capacity(measuring: Measuring, prompt: int, answer: int, shares: Sequence[float]) -> float:
    """Requests per second of unmerged-only with full batches."""
    costs, _ = machine_costs(measuring)
    return full_batch_capacity(costs, prompt, answer, shares)


def video(quick: bool) -> Video:
    """Video analytics: a chunk of six frames of 256 tokens (V-LoRA 6.2), quick: two frames of 64."""
    frames, tokens = (2, 64) if quick else (6, 256)
    return Video(streams=8, frames=frames, frame_tokens=tokens, patches=4 * tokens)


def chunks(workload: Video, number: int, num_adapters: int, rate: float, heads: bool) -> list[Arrival]:
    """Chunks of cameras at a rate of all together, answered by a head or in words."""
    return [
        arrival._replace(
            time_s=arrival.time_s * workload.streams / rate,
            prompt_tokens=arrival.prompt_tokens + workload.frames,  # a token before each picture
            answer_tokens=0 if heads else WORDS,
        )
        for arrival in workload.arrivals(number, num_adapters, seed=0)
    ]


def on_engine(measuring: Measuring, policy: str, arrivals: Sequence[Arrival], side: int) -> dict[str, float]:
    """Average token latency of these arrivals on the engine, after a warm-up with some of them at once, and the seconds
    in which it had requests.

    Args:
        measuring: Its setting has the model and the device.
        policy: The policy's name.
        arrivals: In order of time.
        side: Patches per side of a picture.
    """
    setting = measuring.setting
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(setting.model, RANK, setting.device, policy, side, Path(folder))
    # A GPU also captures a graph for each batch size; on a CPU a request takes up to a minute.
    first = arrivals[: 1 if setting.device.type == "cpu" else 16]
    drive({policy: worker}, [arrival._replace(time_s=0.0) for arrival in first])
    before_s = worker.clock.busy_s
    found = drive({policy: worker}, arrivals)[policy].finished
    return {"ms": average_token_latency_ms(found), "busy s": worker.clock.busy_s - before_s}
