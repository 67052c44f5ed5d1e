"""Waiting for a server, or its engine, to become ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vlora.client.sync import Client
from vlora.errors import Disconnected, EngineDead

PAUSE_S = 0.5


def wait_for_server(
    client: Client,
    wait_s: float,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Return once the server answers; after `wait_s` seconds, or when `stop` is set, raise Disconnected or EngineDead.

    say is called once, with the reason for waiting.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + wait_s
    reported = False
    while True:
        try:
            client.stats()
            return
        except (Disconnected, EngineDead) as error:
            if stop.is_set() or time.monotonic() >= deadline:
                raise
            if not reported:
                say(f"{error}; waiting for it")
                reported = True
            stop.wait(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
