"""How many threads a step computes with, where nothing else is configured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_ROOT = Path("/")


def default_threads(
    num_ranks: int = 1,
    *,
    environ: Mapping[str, str] = os.environ,
    cpus: Iterable[int] | None = None,
    root: Path = _ROOT,
) -> int:
    """Threads for each of `num_ranks` ranks: the physical cores that this process may use, shared between the ranks.

    OMP_NUM_THREADS, where it is set to a number, is taken instead of the cores. Two hardware threads of one core share
    its multipliers and its way to memory, so they count once. A CPU quota of the control group counts in whole cores.

    Args:
        num_ranks: Processes that share the machine, each with its own threads.
        environ: The environment variables.
        cpus: Logical CPUs of the process; None asks the system.
        root: Where the system's files are.
    """
    configured = environ.get("OMP_NUM_THREADS", "")
    cores = int(configured) if configured.isdecimal() else _cores(cpus, root)
    return max(1, cores // num_ranks)


def _cores(cpus: Iterable[int] | None, root: Path) -> int:
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_core(cpu, root) for cpu in cpus})
    return min([cores, *(max(1, int(quota)) for quota in _quotas(root))])


def _core(cpu: int, root: Path) -> tuple[str, ...]:
    """What identifies the physical core of a logical CPU; itself where the system does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return (str(cpu),)


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas of the process's control groups (versions 1 and 2) and of those above them, in CPUs."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container sees its own group as the root of the mount, while the path may be the one outside of it.
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == base.parent:
                break
            quota = _quota_v1(folder) if controllers else _quota_v2(folder)
            if quota is not None:
                yield quota


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
