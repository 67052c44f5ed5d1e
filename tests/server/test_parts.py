"""Streamed text over RPyC: complete, in order, and joined when the reader is slow."""

from __future__ import annotations

import queue
import threading

from vlora.server.rpyc.protocol import Parts


def test_what_waits_goes_together() -> None:
    told: list[None] = []
    parts = Parts(lambda text: text)
    parts.put("before anybody ")
    parts.put("writes")
    parts.tell(lambda: told.append(None))
    assert len(told) == 1 and parts.take() == "before anybody writes" and parts.take() is None
    for word in ("one ", "two ", "three"):
        parts.put(word)
    assert len(told) == 2 and parts.take() == "one two three"
    parts.put("four")
    assert len(told) == 3 and parts.take() == "four"


def test_nothing_is_lost_between_two_threads() -> None:
    words = [f"{number} " for number in range(20_000)]
    parts = Parts(lambda text: text)
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()
    replies: list[str] = []

    def write() -> None:
        while told.get():
            if (reply := parts.take()) is not None:
                replies.append(reply)

    writer = threading.Thread(target=write)
    writer.start()
    for number, word in enumerate(words):
        if number == 100:
            parts.tell(lambda: told.put(True))
        parts.put(word)
    told.put(False)
    writer.join()
    assert "".join(replies) == "".join(words) and len(replies) <= len(words) - 99
