"""The machine: versions, missing packages, and the ceilings that the other stages compare with."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch

from vlora.bench.gpu.context import Context, device_seconds, host_seconds, memory_speeds

# Packages beyond torch, transformers and PEFT, and what needs them.
_PACKAGES = {
    "msgspec": "the engine",
    "greenlet": "interruptible image encoding",
    "scipy": "the stage costs",
    "PIL": "image processors",
    "cv2": "detection heads",
    "triton": "kernels on a GPU",
    "pytest": "the stage oracle",
    "hypothesis": "the stage oracle",
    "xdist": "parallel oracle tests",
    "rpyc": "a server",
    "fastapi": "a server",
    "flashinfer": "nothing; an optional attention library",
}
_SIDE, _SMALL_SIDE = 8192, 256
_LAUNCHES = 1000


def run(context: Context) -> dict[str, Any]:
    """Describe the device. A missing package is no error here: the stages that need it report it."""
    missing = {name: use for name, use in _PACKAGES.items() if importlib.util.find_spec(name) is None}
    found: dict[str, Any] = {"missing": missing, "cores": os.cpu_count(), "nvcc": shutil.which("nvcc")}
    if context.on_gpu:
        found["gpu"] = _gpu()
    context.keep(found)
    found["bytes_per_s"] = speeds = memory_speeds(context)
    found["product_flops_per_s"] = _product_speed(context)
    found |= _launch_cost(context)
    read, multiplied = max(speeds.values()) / 1e12, found["product_flops_per_s"] / 1e12
    speed = f"memory {read:.2f} TB/s ({max(speeds, key=speeds.__getitem__)}), product {multiplied:.0f} TFLOP/s"
    return found | {"summary": speed + (f"; missing: {', '.join(missing)}" if missing else "")}


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "total_bytes": total,
        "free_bytes": free,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _product_speed(context: Context) -> float:
    """Floating-point operations per second of a large product in bfloat16, of random values."""
    side = _SIDE if context.on_gpu else _SMALL_SIDE
    left, right = (torch.randn(side, side, device=context.device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / device_seconds(context, lambda: torch.mm(left, right, out=out))


def _launch_cost(context: Context) -> dict[str, float]:
    """Seconds of one launch of a minimal kernel: by the host, and within a graph."""
    value = torch.zeros(1, device=context.device)
    launches = _LAUNCHES if context.on_gpu else 10

    def launch() -> None:
        for _ in range(launches):
            value.add_(1.0)

    by_host = sorted(host_seconds(context, launch))
    found = {"launch_s": by_host[len(by_host) // 2] / launches}
    if context.on_gpu:
        found["launch_in_graph_s"] = device_seconds(context, launch, launches)
        found["triton_launch_in_graph_s"] = _triton_launch_s(context)
    return found


def _triton_launch_s(context: Context) -> float:
    from atmm.triton.pointwise import rms_norm  # needs Triton

    row = torch.ones(1, 16, device=context.device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            rms_norm(row, row[0], 1e-6)

    return device_seconds(context, launches, _LAUNCHES)
