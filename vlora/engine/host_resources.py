"""The CPU cores and memory that this process may use, its default number of threads, and how a process has ended.

Linux control groups (containers, services) leave a process less CPU time and memory than the machine has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_SPINS = 2000  # docs/decisions/0089


def default_threads(
    num_ranks: int = 1,
    *,
    environ: Mapping[str, str] = os.environ,
    cpus: Iterable[int] | None = None,
    root: Path = ROOT,
) -> int:
    """Threads for each of `num_ranks` ranks: the physical cores available to this process, divided by the ranks.

    OMP_NUM_THREADS, if set to a number, replaces the number of cores. Hardware threads of one core share its
    multipliers and its memory path, so they count once. A CPU quota of the control group counts in whole cores.

    Args:
        num_ranks: Processes that share the machine, each with its own threads.
        cpus: Logical CPUs of the process; None queries the system.
    """
    configured = environ.get("OMP_NUM_THREADS", "")
    cores = int(configured) if configured.isdecimal() else _cores(cpus, root)
    return max(1, cores // num_ranks)


def thread_waiting(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for a process that computes: how its threads wait for each other.

    GNU OpenMP, which torch's Linux wheels contain, reads them when it is loaded. By default a thread spins for some
    milliseconds before it sleeps. Where other processes need the cores, it spins while the thread that it waits for is
    not running, at each of a step's hundreds of products. A few microseconds suffice where the cores are free.

    Args:
        environ: The environment variables; a setting there is left as it is.
    """
    configured = "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ
    return {} if configured else {"GOMP_SPINCOUNT": str(_SPINS)}


def _cores(cpus: Iterable[int] | None, root: Path) -> int:
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_core(cpu, root) for cpu in cpus})
    return min([cores, *(max(1, int(quota)) for quota in cpu_quotas(root))])


def _core(cpu: int, root: Path) -> tuple[str, ...]:
    """The identity of a logical CPU's physical core; the CPU itself if the system does not report one."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return (str(cpu),)


class _Group(NamedTuple):
    folder: Path
    version: int


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """CPU quotas of the process's groups and their ancestors, in CPUs. root: root of the system's files."""
    for group in _groups("cpu", root):
        quota = _cpu_quota(group)
        if quota is not None:
            yield quota


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that the process's groups and their ancestors still allow; None without a limit.

    File pages that were not used recently count as free: the kernel reclaims them before the limit is reached.
    """
    left = [bytes_left for group in _groups("memory", root) if (bytes_left := _memory_left(group)) is not None]
    return max(0, min(left)) if left else None


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A container sees its own group as the root of the mount, while the path may be the one on the host.
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == base.parent:
                break
            yield _Group(folder, 1 if controllers else 2)


def _cpu_quota(group: _Group) -> float | None:
    try:
        if group.version == 2:
            quota, period = (group.folder / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        allowed = int((group.folder / "cpu.cfs_quota_us").read_text())
        return None if allowed <= 0 else allowed / int((group.folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _memory_left(group: _Group) -> int | None:
    if group.version == 2:
        limit, usage, unused = "memory.max", "memory.current", "inactive_file"
    else:
        limit, usage, unused = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    try:
        most, used = int((group.folder / limit).read_text()), int((group.folder / usage).read_text())
        stat = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
        return most - used + int(stat.get(unused, 0))
    except (OSError, ValueError):  # "max" is not a number: no limit
        return None


def describe_exit(code: int) -> str:
    """code: the process's return code, negative for a signal."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
