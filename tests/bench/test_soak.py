"""Error detection of the soak bench: lost, duplicate or truncated answers are rejected; phases and growth are computed
correctly.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.soak import SoakResult, complete_text, run_until
from tests.server.api import running_api
from vlora.bench.serve.surfaces import HttpProtocol, connected


def piece(text: str = "", reason: str | None = None, name: str = "id") -> dict[str, Any]:
    scores = {"content": [{"token": text}]} if text else None
    return {"id": name, "choices": [{"delta": {"content": text}, "finish_reason": reason, "logprobs": scores}]}


USAGE = {"id": "id", "choices": [], "usage": {"completion_tokens": 3}}
WHOLE = [piece(), piece("a"), piece("b"), piece(reason="stop"), USAGE]


def answered(events: list[Any], end: str = "[DONE]", status: int = 200) -> str:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + [f"data: {end}\n\n"]
    return complete_text(status, "".join(lines).encode())


def test_complete_answers_are_accepted() -> None:
    assert answered(WHOLE) == "ab"
    by_length = [piece(), piece("a"), piece("b"), piece("c"), piece(reason="length"), USAGE]
    assert answered(by_length) == "abc"


@pytest.mark.parametrize(
    "events",
    [
        WHOLE[:2] + WHOLE[3:],
        [*WHOLE[:2], *WHOLE[1:]],
        WHOLE[:3] + WHOLE[4:],
        [*WHOLE[:4], *WHOLE[3:]],
        [*WHOLE[:2], piece("b", name="another"), *WHOLE[3:]],
        WHOLE[:4],
        [*WHOLE[:3], {"error": {"code": "engine_dead"}}],
    ],
    ids=["lost", "doubled", "no end", "two ends", "another's", "no usage", "error"],
)
def test_incomplete_answers_are_rejected(events: list[Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        answered(events)
    with pytest.raises(ValueError, match="ends with"):
        answered(WHOLE, end="nothing")
    with pytest.raises(ValueError, match="status 429"):
        answered(WHOLE, status=429)


@pytest.mark.slow
def test_the_http_client_works_with_the_server() -> None:
    def body(content: str, **fields: Any) -> dict[str, Any]:
        return {"model": "base", "messages": [{"role": "user", "content": content}], **fields}

    async def main(port: int) -> None:
        async with connected(port) as web:
            for content in ("say:one two", "say:" + "long " * 300, "say:\u00fc"):
                text = content.removeprefix("say:")
                status, events = await web.post("/v1/chat/completions", body(content, max_tokens=3000, stream=True))
                *chunks, done = events.decode().removesuffix("\n\n").split("\n\n")
                choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
                assert (status, done) == (200, "data: [DONE]")
                assert "".join(choice["delta"].get("content", "") for choice in choices) == text
                status, whole = await web.post("/v1/chat/completions", body(content, max_tokens=3000))
                assert (status, json.loads(whole)["choices"][0]["message"]["content"]) == (200, text)
            status, refused = await web.post("/v1/chat/completions", body(""))
            assert status == 400 and json.loads(refused)["error"]["code"] == "bad_request"
            web.abort()
            with pytest.raises((EOFError, OSError)):
                await web.post("/v1/chat/completions", body("say:late"))

    with running_api() as api:
        asyncio.run(main(api.port))
        assert api.idle()


@pytest.mark.parametrize("size", [1, 7, 10_000], ids="{} bytes at once".format)
def test_an_answer_ends_at_its_last_byte_for_any_split(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    for sent in (
        head + b"Content-Length: 5\r\n\r\nhello",
        head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ):
        protocol = HttpProtocol()
        for _ in range(2):  # the connection is kept
            assert protocol.post("/", {}).endswith(b"\r\n\r\n{}")
            taken = [protocol.receive(sent[at : at + size]) for at in range(0, len(sent), size)]
            assert taken == [False] * (len(taken) - 1) + [True]
            assert (protocol.status, protocol.body) == (200, b"hello")
        protocol.post("/", {})
        assert not protocol.receive(sent[:-1])
        with pytest.raises(EOFError):
            protocol.receive(b"")


def test_invalid_http_and_the_last_answer_raise() -> None:
    protocol = HttpProtocol()
    protocol.post("/", {})
    with pytest.raises(ValueError, match="no HTTP"):
        protocol.receive(b"SSH-2.0\r\n\r\n")
    protocol = HttpProtocol()
    protocol.post("/", {})
    assert protocol.receive(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(EOFError):
        protocol.post("/", {})


def test_phases_and_growth() -> None:
    soak = SoakResult(warm_s=100.0, end_s=200.0, num_phases=4)
    assert [soak.has_misbehaving_clients(at) for at in (90, 110, 130, 160, 180)] == [False, False, True, False, True]
    soak.answers = [(90, 95), (101, 110), (110, 130), (126, 149), (176, 178), (102, 170)]
    assert soak.latencies(bad=None) == [9, 20, 23, 2, 68]
    assert soak.latencies(bad=False) == [9] and soak.latencies(bad=True) == [23, 2]
    soak.memory_mib["engine"] = [(float(at), 50.0 if at < 100 else 100.0 + (at >= 190)) for at in range(300)]
    assert soak.growth("engine") == pytest.approx(1.01, abs=1e-3)


def test_unfinished_clients_are_cancelled_and_counted() -> None:
    ended: list[str] = []

    async def take(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async def main() -> SoakResult:
        now = asyncio.get_running_loop().time()
        soak = SoakResult(now, now, 1)
        await run_until([take("short", 0.0), take("long", 60.0), take("longer", 60.0)], now + 0.2, soak)
        return soak

    assert asyncio.run(main()).num_cut == 2
    assert sorted(ended) == ["long", "longer", "short"]


def test_an_error_of_one_client_ends_all_and_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("the bench's own")

    async def main() -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.wait_for(run_until([fail(), asyncio.sleep(60.0)], now + 60, SoakResult(now, now, 1)), 10)

    with pytest.raises(ValueError, match="own"):
        asyncio.run(main())
