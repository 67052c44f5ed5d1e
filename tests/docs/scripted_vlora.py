"""The `vlora` command with a scripted engine: `python -m tests.docs.scripted_vlora ...`."""

from __future__ import annotations

import functools

import tests.server.light  # noqa: F401
import vlora.cli
import vlora.server.supervise
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor

if __name__ == "__main__":
    vlora.server.supervise.serve = functools.partial(  # type: ignore[assignment]
        vlora.server.supervise.serve,
        engine_command=ENGINE_COMMAND,
        load_processor=lambda model: ByteProcessor(),  # type: ignore[arg-type,return-value]
    )
    vlora.cli.main()
