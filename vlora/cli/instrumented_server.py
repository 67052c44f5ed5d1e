"""The server of `vlora bench gateway`: `vlora serve` with an engine process that also serves the bench's socket.

Run as `python -m vlora.cli.instrumented_server PATH`; see `vlora/bench/serving/instrumented_engine.py`.
"""

from __future__ import annotations

import asyncio
import functools
import sys

from transformers.utils import logging

from fusion.embedded import checkpoint_path
from vlora.config import EngineConfig, ServerConfig
from vlora.server.launch import serve


def main(path: str) -> None:
    logging.disable_progress_bar()
    config = EngineConfig(
        model=str(checkpoint_path()), load_format="dummy", dtype="float32", threads=1, prefix_cache=False
    )
    command = (sys.executable, "-m", "vlora.bench.serving.instrumented_engine", path)
    ports = ServerConfig(rpyc_port=0, http_port=0)
    announce = functools.partial(print, flush=True)
    asyncio.run(serve(config, ports, {}, announce=announce, model_name="embedded", engine_command=command))


if __name__ == "__main__":
    main(sys.argv[1])
