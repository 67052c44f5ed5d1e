"""An engine process with a scripted engine: `python -m tests.server.scripted_process DESCRIPTOR`."""

from __future__ import annotations

import sys

from tests.server.scripted import ScriptedEngine
from vlora.engine.ipc.worker import run

if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), ScriptedEngine))  # type: ignore[arg-type]
