"""Threads of an engine: their default number (physical cores, within the process's limits), and how they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.engine.host_resources import default_threads, thread_waiting


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
