"""Bodies that are small on the wire and large in memory: refused quickly, with one error named."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.server.api import Api, running_api

START = b'{"model": "base", "messages": [{"role": "user", "content": "x"}'
BODIES = {
    "numbers for messages": b'{"model": "base", "messages": [' + b"0," * 400_000 + b"0]}",
    "unknown fields": START + b"]," + b",".join(b'"%x": 0' % each for each in range(100_000)) + b"}",
    "unknown fields of a message": START[:-1]
    + b",".join([b"", *(b'"%x":0' % each for each in range(99_999))])
    + b"}]}",
    "messages": START + b',{"role": "user", "content": ""}' * 50_000 + b"]}",
    "numbers for parts": b'{"model":"base","messages":[{"role":"user","content":[' + b"0," * 400_000 + b"0]}]}",
    "parts": b'{"model":"base","messages":[{"role":"user","content":['
    + b",".join([b'{"type":"text","text":""}'] * 50_000)
    + b"]}]}",
    "stop strings": START + b'], "stop": [' + b'"a",' * 400_000 + b'"a"]}',
    "commas": START + b'], "metadata": [' + b"{}," * 1_100_000 + b"{}]}",
}


def longest_wait_beside(api: Api, body: bytes) -> float:
    """Seconds that the slowest other request took while the server refused the body."""
    slowest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal slowest
        while not done.is_set():
            started = time.monotonic()
            api.call("GET", "/health")
            slowest = max(slowest, time.monotonic() - started)

    watching = threading.Thread(target=watch)
    watching.start()
    status, answer = api.call("POST", "/v1/chat/completions", raw=body)
    done.set()
    watching.join()
    assert status in (400, 413) and len(answer["error"]["message"]) < 1000, answer
    return slowest


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name, marks=() if name in ("unknown fields", "commas") else pytest.mark.slow)
        for name, body in BODIES.items()
    ],
)
def test_a_body_of_many_values_does_not_block_others(body: bytes) -> None:
    with running_api() as api:
        assert api.chat("say:x")[0] == 200
        # A busy machine is slow occasionally, a blocked server every time.
        assert any(longest_wait_beside(api, body) < 1.5 for _ in range(4))


def test_fields_copied_from_answers_are_accepted() -> None:
    with running_api() as api:
        empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
        messages = [
            {"role": "user", "content": "say:x", "name": "bob"},
            {"role": "assistant", "content": "x", **empty},
            {"role": "user", "content": [{"type": "text", "text": "say:y", "cache_control": None}]},
        ]
        status, answer = api.chat("", messages=messages)
        assert status == 200, answer
        assert api.chat("say:x", stream=True, stream_options={"include_obfuscation": False})[0] == 200
        status, answer = api.chat("say:x", stream=True, stream_options={"include_obfuscation": True})
        assert (status, answer["error"]["param"]) == (400, "stream_options.include_obfuscation")


def refused(api: Api, **fields: object) -> str:
    status, answer = api.chat("say:x", **fields)
    assert status == 400, answer
    return json.dumps(answer["error"])


def test_stop_strings_are_short() -> None:
    with running_api() as api:
        assert "1000" in refused(api, stop="x" * 1001) and "1000" in refused(api, stop=["x" * 1001])
        assert api.chat("say:x", stop=["x" * 1000])[0] == 200
