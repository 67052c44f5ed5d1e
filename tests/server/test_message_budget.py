"""The messages of all callers share one limit, and every end of a request releases its bytes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.api import image_part, running_api
from tests.server.running import png, running_server
from tests.server.scripted import write_adapter
from vlora.client import Client
from vlora.config import ServerConfig
from vlora.errors import BadConfig, VLoraError
from vlora.server.rpyc import channel
from vlora.server.security.message_budget import ByteBudget, ByteCharge

BODY = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 190000\r\n\r\n"


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_http_bodies_share_one_limit() -> None:
    with running_api(max_message_bytes=200_000, max_held_bytes=400_000) as api:
        budget = api.front_end.message_budget
        slow = [socket.create_connection(("127.0.0.1", api.port)) for _ in range(2)]
        for each in slow:
            each.sendall(BODY + b" " * 180_000)
        assert soon(lambda: budget.used == 360_000)
        status, answer = api.chat([{"type": "text", "text": "say:x" + "y" * 60_000}])
        assert status == 429 and "400000 bytes" in json.dumps(answer)
        assert api.chat("say:x")[0] == 200
        for each in slow:
            each.close()
        assert soon(lambda: budget.used == 0)
        assert api.chat([{"type": "text", "text": "say:x"}, image_part(png())])[0] == 200
        assert soon(lambda: budget.used == 0)


@pytest.mark.slow
def test_rpyc_messages_wait_for_the_end_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = png() + b"\0" * 150_000
    with running_server(max_message_bytes=200_000, max_held_bytes=200_000, request_timeout_s=1.0) as server:
        budget = server.front_end.message_budget
        with Client(port=server.port) as one, Client(port=server.port) as two:
            stream = one.stream("forever", [picture], max_tokens=90_000)
            next(stream)
            assert budget.used > 150_000
            waiting = threading.Thread(target=two.generate, args=("say:x", [picture]))
            waiting.start()
            time.sleep(0.2)
            assert waiting.is_alive()
            with pytest.raises(VLoraError):
                list(stream)  # its deadline has passed
            waiting.join(5)
            assert not waiting.is_alive() and soon(lambda: budget.used == 0)
            assert two.generate("say:x", [picture]).text == "x"
        monkeypatch.setattr(channel, "ROOM_S", 0.1)
        assert budget.reserve(200_000)
        with Client(port=server.port) as refused, pytest.raises(VLoraError):
            refused.generate("say:x", [picture])
        budget.release(200_000)
        assert soon(lambda: budget.used == 0)


def test_a_frame_counts_until_it_is_answered(tmp_path: Path) -> None:
    frame = png() + b"\0" * 100_000
    with running_server() as server:
        server.on_loop(server.front_end.adapters.load("cam", write_adapter(tmp_path, {"night": 1})))
        budget = server.front_end.message_budget
        most = 0
        reserve = budget.reserve

        def recording_reserve(num_bytes: int, wait_s: float = 0.0) -> bool:
            nonlocal most
            reserved = reserve(num_bytes, wait_s)
            most = max(most, budget.used)
            return reserved

        budget.reserve = recording_reserve  # type: ignore[method-assign]
        with Client(port=server.port) as client, client.open_stream(adapter="cam", head="night", drop="none") as stream:
            for _ in range(6):
                stream.send(frame)
            stream.end()
            assert all(result.answer is not None for result in stream)
        assert most > 100_000 and soon(lambda: budget.used == 0)


def test_a_message_that_arrives_too_slowly_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "FRAME_S", 0.2)
    with running_server() as server:
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        slow.sendall(channel.BoundedChannel.FRAME_HEADER.pack(100_000, 0) + b"x" * 1000)
        assert soon(lambda: server.front_end.message_budget.used == 100_000)
        assert slow.recv(1) == b"" and soon(lambda: server.front_end.message_budget.used == 0)


def test_a_budget_is_bounded_and_a_charge_is_released_once() -> None:
    budget = ByteBudget(10)
    assert budget.reserve(6) and not budget.reserve(5) and budget.reserve(4)
    budget.release(6)
    assert budget.reserve(5)
    charge = ByteCharge(budget)
    assert not charge.add(2, 0) and charge.add(1, 0) and budget.used == 10
    moved = charge.move()
    charge.release()
    assert budget.used == 10
    for _ in range(2):
        moved.release()
        assert budget.used == 9
    with pytest.raises(BadConfig, match="max_held_bytes is 5"):
        ServerConfig(max_held_bytes=5)
