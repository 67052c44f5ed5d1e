"""A simulated CUDA device for tests on machines without a GPU.

Tensors report the device `cuda:0` and are computed on the CPU. Operators fail when their operands are on two devices,
as on a GPU. Kernel launches, copies between host and device, and host synchronizations are counted with their call
sites. `simulated_cuda()` installs the device for a process; Triton kernels run in Triton's interpreter.

Not simulated: time, memory limits, rounding of GPU kernels, and concurrency of streams. Operations complete in the
order in which the host issues them. One aten operator counts as one launch, also where a GPU needs several kernels.
"""

from __future__ import annotations

from tests.simulated_cuda.counts import Counts, Kind, counting
from tests.simulated_cuda.install import simulated_cuda
from tests.simulated_cuda.tensor import CUDA, DeviceMismatch, SimulatedTensor

__all__ = ["CUDA", "Counts", "DeviceMismatch", "Kind", "SimulatedTensor", "counting", "simulated_cuda"]
