"""Error detection of the soak bench: lost, duplicate or truncated answers are rejected; phases and growth are computed
correctly.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.api import running_api
from vlora.bench.http_client import Talk, connected
from vlora.bench.soak import _Soak, _until, whole_text

pytestmark = pytest.mark.slow


def piece(text: str = "", reason: str | None = None, name: str = "id") -> dict[str, Any]:
    scores = {"content": [{"token": text}]} if text else None
    return {"id": name, "choices": [{"delta": {"content": text}, "finish_reason": reason, "logprobs": scores}]}


USAGE = {"id": "id", "choices": [], "usage": {"completion_tokens": 3}}
WHOLE = [piece(), piece("a"), piece("b"), piece(reason="stop"), USAGE]


def answered(events: list[Any], end: str = "[DONE]", status: int = 200) -> str:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + [f"data: {end}\n\n"]
    return whole_text(status, "".join(lines).encode())


def test_a_whole_answer_is_one() -> None:
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
def test_what_is_not_whole_is_told(events: list[Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        answered(events)
    with pytest.raises(ValueError, match="ends with"):
        answered(WHOLE, end="nothing")
    with pytest.raises(ValueError, match="status 429"):
        answered(WHOLE, status=429)


def test_the_benchs_http_is_the_servers() -> None:
    def body(said: str, **fields: Any) -> dict[str, Any]:
        return {"model": "base", "messages": [{"role": "user", "content": said}], **fields}

    async def main(port: int) -> None:
        async with connected(port) as web:
            for said in ("say:one two", "say:" + "long " * 300, "say:\u00fc"):
                text = said.removeprefix("say:")
                status, events = await web.post("/v1/chat/completions", body(said, max_tokens=3000, stream=True))
                *chunks, done = events.decode().removesuffix("\n\n").split("\n\n")
                choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
                assert (status, done) == (200, "data: [DONE]")
                assert "".join(choice["delta"].get("content", "") for choice in choices) == text
                status, whole = await web.post("/v1/chat/completions", body(said, max_tokens=3000))
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
def test_an_answer_is_whole_at_its_end_however_it_is_cut(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    for sent in (
        head + b"Content-Length: 5\r\n\r\nhello",
        head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ):
        talk = Talk()
        for _ in range(2):  # the connection is kept
            assert talk.post("/", {}).endswith(b"\r\n\r\n{}")
            taken = [talk.take(sent[at : at + size]) for at in range(0, len(sent), size)]
            assert taken == [False] * (len(taken) - 1) + [True]
            assert (talk.status, talk.body) == (200, b"hello")
        talk.post("/", {})
        assert not talk.take(sent[:-1])
        with pytest.raises(EOFError):
            talk.take(b"")


def test_what_is_no_http_and_a_connections_last_answer_are_told() -> None:
    talk = Talk()
    talk.post("/", {})
    with pytest.raises(ValueError, match="no HTTP"):
        talk.take(b"SSH-2.0\r\n\r\n")
    talk = Talk()
    talk.post("/", {})
    assert talk.take(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(EOFError):
        talk.post("/", {})


def test_phases_and_growth() -> None:
    soak = _Soak(warm_s=100.0, end_s=200.0, num_phases=4)
    assert [soak.bad_company(at) for at in (90, 110, 130, 160, 180)] == [False, False, True, False, True]
    soak.answers = [(90, 95), (101, 110), (110, 130), (126, 149), (176, 178), (102, 170)]
    assert soak.latencies(bad=None) == [9, 20, 23, 2, 68]
    assert soak.latencies(bad=False) == [9] and soak.latencies(bad=True) == [23, 2]
    soak.memory_mib["engine"] = [(float(at), 50.0 if at < 100 else 100.0 + (at >= 190)) for at in range(300)]
    assert soak.growth("engine") == pytest.approx(1.01, abs=1e-3)


def test_what_is_not_done_by_the_end_is_cut_off_and_counted() -> None:
    ended: list[str] = []

    async def take(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async def main() -> _Soak:
        now = asyncio.get_running_loop().time()
        soak = _Soak(now, now, 1)
        await _until([take("short", 0.0), take("long", 60.0), take("longer", 60.0)], now + 0.2, soak)
        return soak

    assert asyncio.run(main()).num_cut == 2
    assert sorted(ended) == ["long", "longer", "short"]


def test_a_mistake_of_one_ends_all_and_is_told() -> None:
    async def fail() -> None:
        raise ValueError("the bench's own")

    async def main() -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.wait_for(_until([fail(), asyncio.sleep(60.0)], now + 60, _Soak(now, now, 1)), 10)

    with pytest.raises(ValueError, match="own"):
        asyncio.run(main())
