"""`vlora serve` in a process of its own, for applications that start their server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vlora.client import Client
from vlora.errors import VLoraError

VLORA = (sys.executable, "-m", "vlora.cli")

_STOP_S = 15.0


@contextlib.contextmanager
def serving(
    model: str,
    adapters: Path,
    *,
    command: Sequence[str] = VLORA,
    options: Sequence[str] = (),
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[Client]:
    """A server on a free port of this machine, from its ready line to the end of the block.

    Args:
        command: that runs `vlora`. options: further flags of `vlora serve`.
        announce: called with the ready line.

    Raises:
        VLoraError: the server did not start; it has printed its own error.
    """
    flags = ("--model", model, "--adapters", str(adapters), "--rpyc-port", "0", *options)
    # The server runs on loopback for one caller only and uses no token from the environment.
    open_to_all = os.environ | {"VLORA_TOKEN": "", "VLORA_ADMIN_TOKEN": ""}
    server = subprocess.Popen([*command, "serve", *flags], stdout=subprocess.PIPE, text=True, env=open_to_all)
    assert server.stdout is not None
    try:
        line = server.stdout.readline().strip()
        match = re.match(r"ready: rpyc (\S+):(\d+) ", line)
        if match is None:
            raise VLoraError("`vlora serve` failed, see above")
        announce(line)
        with Client(match[1], int(match[2])) as client:
            yield client
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
