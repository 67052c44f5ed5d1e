"""A server that is not there yet, or has no engine yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vlora.client.sync import Client
from vlora.errors import Disconnected, EngineDead

_PAUSE_S = 0.5


def wait_for_server(
    client: Client,
    wait_s: float,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Return once it answers; after `wait_s` seconds, or when `stop` is set, raise Disconnected or EngineDead.

    say is told, once, that there is something to wait for.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            client.stats()
            return
        except (Disconnected, EngineDead) as error:
            if stop.is_set() or time.monotonic() >= deadline:
                raise
            if not told:
                say(f"{error}; it is waited for")
                told = True
            stop.wait(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
