"""`vlora serve` with a scripted engine, over both wires.

`python -m tests.server.scripted_serve MODEL DRAIN_S [NAME=PATH ...] [TOKEN_FILE]`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import vlora.cli
import vlora.server.launch
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor
from vlora.config import EngineConfig, ServerConfig
from vlora.logging_format import configure
from vlora.server.security.access import read_tokens


def main() -> None:
    configure(os.environ)
    _, model, drain_s, *rest = sys.argv
    adapters = dict(each.split("=") for each in rest if "=" in each)
    file = next((Path(each) for each in rest if "=" not in each), None)
    tokens = read_tokens(file, {})
    asyncio.run(
        vlora.server.launch.serve(
            EngineConfig(model=model),
            ServerConfig(rpyc_port=0, http_port=0, drain_s=float(drain_s), tokens=tokens),
            adapters,
            announce=lambda line: print(line, flush=True),
            engine_command=ENGINE_COMMAND,
            load_processor=lambda model: ByteProcessor(),  # type: ignore[arg-type,return-value]
            read_tokens=lambda: read_tokens(file, {}),
            adapter_state=os.environ.get("VLORA_SERVE_ADAPTER_STATE"),
        )
    )


if __name__ == "__main__":
    # The command's own error handling, around the scripted parts.
    vlora.cli.cli.main = lambda **_: main()  # type: ignore[assignment,method-assign]
    vlora.cli.main()
