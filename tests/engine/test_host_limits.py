"""Threads and memory of an engine within the host's limits: their default numbers, and the text that explains them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads, memory_left, thread_waiting
from vlora.engine.limits import Room, compute_limits, free_room
from vlora.errors import BadConfig
from vlora.memory.arena import PAGE_BYTES, block_pages


def machine(root: Path, cores: dict[int, tuple[int, int]]) -> None:
    """cores: package and core of each logical CPU."""
    for cpu, (package, core) in cores.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")


def group(root: Path, line: str, files: dict[str, str]) -> None:
    """line: of /proc/self/cgroup. files: path below /sys/fs/cgroup -> content."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    with (root / "proc/self/cgroup").open("a") as stream:
        stream.write(line + "\n")
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def threads(root: Path, cpus: range | list[int], num_ranks: int = 1, **environ: str) -> int:
    return default_threads(num_ranks, environ=environ, cpus=cpus, root=root)


def test_two_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    machine(tmp_path, {cpu: (cpu % 8 // 4, cpu % 4) for cpu in range(16)})
    assert threads(tmp_path, range(16)) == 8
    assert threads(tmp_path, [0, 8]) == 1
    assert threads(tmp_path, [0, 4]) == 2  # the same core number in another package is another core


def test_cpus_without_topology_count_each(tmp_path: Path) -> None:
    assert threads(tmp_path, range(6)) == 6
    assert default_threads(cpus=None, environ={}, root=tmp_path) >= 1


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/pod/box", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2),
        ("0::/seen/from/outside", {"cpu.max": "400000 100000\n"}, 4),
        ("3:cpu,cpuacct:/box", {"cpu,cpuacct/box/cpu.cfs_quota_us": "-1", "cpu,cpuacct/box/cpu.cfs_period_us": "1"}, 8),
        (
            "3:cpu,cpuacct:/box",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "200000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:memory:/box", {"memory/box/cpu.cfs_quota_us": "1", "memory/box/cpu.cfs_period_us": "1"}, 8),
        ("0::/", {"cpu.max": "no numbers\n"}, 8),
    ],
)
def test_a_quota_of_the_group_or_an_ancestor_limits_threads(
    tmp_path: Path, line: str, files: dict[str, str], expected: int
) -> None:
    group(tmp_path, line, files)
    assert threads(tmp_path, range(8)) == expected


def test_ranks_share_the_cores_and_the_environment_comes_first(tmp_path: Path) -> None:
    assert threads(tmp_path, range(8), num_ranks=3) == 2
    assert threads(tmp_path, range(2), num_ranks=4) == 1
    assert threads(tmp_path, range(8), OMP_NUM_THREADS="3") == 3
    assert threads(tmp_path, range(8), OMP_NUM_THREADS="many") == 8


def test_threads_spin_briefly_unless_the_environment_says_otherwise() -> None:
    assert int(thread_waiting({})["GOMP_SPINCOUNT"]) < 10_000
    for configured in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        assert thread_waiting(configured) == {}


MIB = 2**20


def hf_model(max_positions: int = 32_768) -> Any:
    """The required attributes of a model: 12 layers, 2 KV heads of 64, bfloat16; 6 KiB per token."""
    return SimpleNamespace(
        max_positions=max_positions,
        num_layers=12,
        kv_dim=128,
        dtype=torch.bfloat16,
    )


def blocks(config: EngineConfig, tokens: int) -> int:
    """Pages for the KV of `tokens` tokens."""
    return -(-tokens // config.block_size) * block_pages(12, config.block_size, 128, torch.bfloat16)


ADAPTERS = "256 MiB of adapters"
ONE_EACH = f"one request of 32,768 tokens in each half, and {ADAPTERS}"


@pytest.mark.parametrize(
    ("settings", "basis", "num_tokens", "longest"),
    [
        ({}, f"32 requests of 4,096 tokens, and {ADAPTERS}", 32 * 4096, 32_768),
        ({"max_context": 512, "max_batch_size": 4}, f"4 requests of 512 tokens, and {ADAPTERS}", 4 * 512, 512),
        ({"max_batch_size": 2}, ONE_EACH, None, 32_768),
        ({"device": "cuda"}, f"32 requests of 32,768 tokens, and {ADAPTERS}", 32 * 32_768, 32_768),
    ],
    ids=["a CPU", "a short context", "the longest request", "a GPU"],
)
def test_the_arena_has_room_for_a_full_batch_beside_adapters(
    settings: dict[str, Any], basis: str, num_tokens: int | None, longest: int
) -> None:
    config = EngineConfig(model="m", **settings)
    limits = compute_limits(config, hf_model(), Room(config.device, 64 * 2**30), 0)
    assert limits.arena_basis == basis
    assert limits.max_request_blocks * config.block_size >= longest, "one request of the longest context"
    if num_tokens is not None:
        wanted = blocks(config, num_tokens) + 256 * MIB // PAGE_BYTES
        assert limits.num_pages == pytest.approx(wanted, abs=limits.block_pages)


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.4), ("cuda", 0.9)])
def test_free_memory_limits_the_arena(device: str, share: float) -> None:
    config = EngineConfig(model="m", device=device)
    limits = compute_limits(config, hf_model(), Room(device, 600 * MIB), 100 * MIB)
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
    limits = compute_limits(config, hf_model(), Room("cpu", 64 * 2**30), 0)
    assert limits.arena_basis == "arena_bytes" and limits.num_pages * PAGE_BYTES == pytest.approx(64 * MIB, rel=0.01)
    with pytest.raises(BadConfig, match="set arena_bytes to at least"):
        compute_limits(dataclasses.replace(config, arena_bytes=PAGE_BYTES), hf_model(), Room("cpu", 64 * 2**30), 0)
