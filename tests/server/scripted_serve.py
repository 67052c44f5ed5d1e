"""`vlora serve` with a scripted engine: `python -m tests.server.scripted_serve MODEL DRAIN_S [NAME=PATH ...]`."""

from __future__ import annotations

import asyncio
import os
import sys

import vlora.cli
import vlora.server.launch
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor
from vlora.config import EngineConfig, ServerConfig
from vlora.logging_format import configure


def main() -> None:
    configure(os.environ)
    asyncio.run(
        vlora.server.launch.serve(
            EngineConfig(model=sys.argv[1]),
            ServerConfig(rpyc_port=0, drain_s=float(sys.argv[2])),
            dict(pair.split("=") for pair in sys.argv[3:]),
            announce=lambda line: print(line, flush=True),
            engine_command=ENGINE_COMMAND,
            load_processor=lambda model: ByteProcessor(),  # type: ignore[arg-type,return-value]
        )
    )


if __name__ == "__main__":
    # The command's own error handling, around the scripted parts.
    vlora.cli.cli.main = lambda **_: main()  # type: ignore[assignment,method-assign]
    vlora.cli.main()
