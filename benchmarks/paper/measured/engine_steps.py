"""Engines whose steps run in a chosen mode, over the setting's model and adapters with random weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.paper.measuring import RANK, Setting
from vlora.bench.dummy import BenchModel, language_shapes, write_adapter
from vlora.bench.timed_engine import FixedModePolicy, TimedEngine
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model


@contextlib.contextmanager
def adapter_folders(model: BenchModel, number: int, rank: int = RANK) -> Iterator[dict[str, str]]:
    """Folders of this many adapters, by name: a0, a1, ..."""
    shapes = language_shapes(dummy_model(model.config(), "bfloat16", torch.device("meta"), seed=0))
    with tempfile.TemporaryDirectory() as folder:
        yield {f"a{i}": write_adapter(Path(folder) / f"a{i}", shapes, rank, seed=i) for i in range(number)}


def engine_in_mode(
    setting: Setting,
    adapters: Mapping[str, str],
    *,
    merging: bool,
    context: int,
    longest: int,
    max_batch_size: int = 32,
    max_step_tokens: int = 512,
) -> TimedEngine:
    """An engine that computes every step unmerged, or over the first request's merged weights.

    Args:
        setting: Its model and device.
        adapters: Folders by name.
        merging: Whether steps are merged, or mixed if there are requests for other adapters.
        context: Tokens of each request before its first decode step.
        longest: Tokens of an answer.
        max_batch_size: Of the engine.
        max_step_tokens: Of the engine.
    """
    policy = FixedModePolicy()
    policy.merging = merging
    config = EngineConfig(
        model="dummy",
        device=str(setting.device),
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        arena_bytes=setting.model.arena_bytes,
        merge_fidelity_floor=0.0,
        prefix_cache=False,  # every prompt is computed
    )
    model = dummy_model(setting.model.config(), "bfloat16", setting.device, seed=0)
    return TimedEngine(config, model, adapters, context=context, longest=longest, policy=policy)
