"""The automatic arena size, and the text that explains it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_host_resources import group
from vlora.config import EngineConfig
from vlora.engine.host_resources import memory_left
from vlora.engine.limits import Room, compute_limits, free_room
from vlora.errors import BadConfig
from vlora.memory.arena import PAGE_BYTES, block_pages

MIB = 2**20


def hf_model(max_positions: int = 32_768) -> Any:
    """The required attributes of a model: 12 layers, 2 KV heads of 64, bfloat16; 6 KiB per token."""
    return SimpleNamespace(
        max_positions=max_positions,
        num_layers=12,
        kv_dim=128,
        dtype=torch.bfloat16,
    )


def room(device: str = "cpu", num_bytes: int = 64 * 2**30) -> Room:
    return Room(device, num_bytes)


def blocks(config: EngineConfig, tokens: int) -> int:
    """Pages for the KV of `tokens` tokens."""
    return -(-tokens // config.block_size) * block_pages(12, config.block_size, 128, torch.bfloat16)


def test_on_a_cpu_a_full_batch_of_4096_tokens_each_has_room() -> None:
    config = EngineConfig(model="m")
    limits = compute_limits(config, hf_model(), room(), 0)
    assert limits.arena_basis == "32 requests of 4,096 tokens, and 256 MiB of adapters"
    assert limits.num_pages == pytest.approx(
        blocks(config, 32 * 4096) + 256 * MIB // PAGE_BYTES, abs=limits.block_pages
    )
    assert limits.max_request_blocks * config.block_size >= limits.max_context, "one request of the longest context"


def test_a_short_context_makes_the_arena_smaller() -> None:
    config = EngineConfig(model="m", max_context=512, max_batch_size=4)
    limits = compute_limits(config, hf_model(), room(), 0)
    assert limits.arena_basis == "4 requests of 512 tokens, and 256 MiB of adapters"
    assert limits.num_pages * PAGE_BYTES < 300 * MIB


def test_the_longest_request_has_room_beside_adapters() -> None:
    config = EngineConfig(model="m", max_batch_size=2)
    limits = compute_limits(config, hf_model(), room(), 0)
    assert limits.arena_basis == "one request of 32,768 tokens in each half, and 256 MiB of adapters"
    assert limits.max_request_blocks * config.block_size >= 32_768


def test_on_a_gpu_a_full_batch_of_the_longest_requests_has_room() -> None:
    config = EngineConfig(model="m", device="cuda")
    limits = compute_limits(config, hf_model(), room("cuda"), 0)
    assert limits.arena_basis == "32 requests of 32,768 tokens, and 256 MiB of adapters"
    assert limits.num_pages >= blocks(config, 32 * 32_768)


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.4), ("cuda", 0.9)])
def test_free_memory_limits_the_arena(device: str, share: float) -> None:
    config = EngineConfig(model="m", device=device)
    limits = compute_limits(config, hf_model(), room(device, 600 * MIB), 100 * MIB)
    assert limits.arena_basis == f"{share:.0%} of free memory"
    assert limits.num_pages * PAGE_BYTES == pytest.approx(share * 500 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        ("0::/", {}, None),
        ("0::/", {"memory.max": "max\n", "memory.current": "7", "memory.stat": ""}, None),
        ("0::/", {"memory.max": "1000\n", "memory.current": "300\n", "memory.stat": "anon 9\ninactive_file 50\n"}, 750),
        ("0::/", {"memory.max": "1000", "memory.current": "1100", "memory.stat": ""}, 0),
        (
            "0::/pod/box",
            {
                **{"pod/box/memory.max": "1000", "pod/box/memory.current": "100", "pod/box/memory.stat": ""},
                **{"pod/memory.max": "1500", "pod/memory.current": "1200", "pod/memory.stat": "inactive_file 100"},
            },
            400,
        ),
        (
            "7:memory:/box",
            {
                "memory/box/memory.limit_in_bytes": "1000",
                "memory/box/memory.usage_in_bytes": "600",
                "memory/box/memory.stat": "inactive_file 5\ntotal_inactive_file 30",
            },
            430,
        ),
        ("4:cpu:/box", {"memory.max": "1000", "memory.current": "1", "memory.stat": ""}, None),
    ],
)
def test_a_limit_of_the_control_group_counts_less_what_is_used(
    tmp_path: Path, line: str, files: dict[str, str], left: int | None
) -> None:
    group(tmp_path, line, files)
    assert memory_left(tmp_path) == left


def test_the_arena_stays_within_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.engine.limits.memory_left", lambda: 500 * MIB)
    config = EngineConfig(model="m")
    limits = compute_limits(config, hf_model(), free_room(config, torch.device("cpu")), 0)
    assert limits.num_pages * PAGE_BYTES == pytest.approx(200 * MIB, rel=0.01)


def test_a_configured_size_is_used_unchanged() -> None:
    config = EngineConfig(model="m", arena_bytes=64 * MIB)
    limits = compute_limits(config, hf_model(), room(), 0)
    assert limits.arena_basis == "arena_bytes" and limits.num_pages * PAGE_BYTES == pytest.approx(64 * MIB, rel=0.01)
    with pytest.raises(BadConfig, match="set arena_bytes to at least"):
        compute_limits(dataclasses.replace(config, arena_bytes=PAGE_BYTES), hf_model(), room(), 0)
