"""How many threads a step computes with, where nothing else is configured."""

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
    return min([cores, *(max(1, int(quota)) for quota in cpu_quotas(root))])


def _core(cpu: int, root: Path) -> tuple[str, ...]:
    """What identifies the physical core of a logical CPU; itself where the system does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return (str(cpu),)
