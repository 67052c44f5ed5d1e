"""A real engine whose steps take at least 8 ms: requests still run when they are moved, however fast the machine is.

Run as the process of a replica's engine.
"""

from __future__ import annotations

import sys
import time

from vlora.engine.engine import Engine
from vlora.engine.ipc.worker import run
from vlora.types import RequestOutput

COMMAND = (sys.executable, "-m", "tests.cluster.paced_engine")
_STEP_S = 0.008


class PacedEngine(Engine):
    """An `Engine` that sleeps before each step with work."""

    def step(self) -> tuple[RequestOutput, ...]:
        if self.has_work:
            time.sleep(_STEP_S)
        return super().step()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), PacedEngine))
