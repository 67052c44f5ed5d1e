"""The default number of compute threads per step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from vlora.engine.control_groups import ROOT, cpu_quotas


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
        environ: The environment variables.
        cpus: Logical CPUs of the process; None queries the system.
        root: Root of the system's files.
    """
    configured = environ.get("OMP_NUM_THREADS", "")
    cores = int(configured) if configured.isdecimal() else _cores(cpus, root)
    return max(1, cores // num_ranks)


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
