"""The console's data, without a browser: visibility by token, and low cost for the engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.processes import until
from tests.server.api import Api, running_api
from tests.server.running import png
from tests.server.scripted import ScriptedInterface, write_adapter
from tests.server.test_frame_stream import TIMINGS
from vlora.client.values import FrameAnswer, FrameResult, HeadResult, StreamOptions
from vlora.config import ServerConfig, Token
from vlora.engine.snapshot import EngineSnapshot
from vlora.errors import EngineDead
from vlora.server.console.routes import CONSOLE_FILES, SnapshotFeed
from vlora.server.images import RawImage
from vlora.server.security.limits import ByteBudget, ByteCharge
from vlora.server.streams.frame_stream import draw
from vlora.types import FoundBox

CAMERAS = Token(name="cameras", secret="camera-token-0123456789")
GUEST = Token(name="guest", secret="guest-token-0123456789")
OPS = Token(name="ops", secret="admin-token-0123456789", admin=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_adapter(tmp_path_factory.mktemp("console") / "cam", {"night": 1}))


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    """Two streams: one of the cameras' token, one of the operator's."""
    with running_api(tokens=(CAMERAS, GUEST, OPS)) as made:
        made.on_loop(made.front_end.adapters.load("cam", str(folder)))
        for owner in (CAMERAS, OPS):
            open_stream(made, owner)
        yield made


def open_stream(api: Api, owner: Token | None) -> str:
    async def opened() -> str:
        return api.front_end.streams.open(StreamOptions(heads=(("cam", "night"),), name="gate"), 1, owner, object())

    made: str = api.on_loop(opened())
    return made


def send(api: Api, stream_id: str, owner: Token | None, number: int, brightness: int = 220) -> None:
    stream = api.front_end.streams.use(stream_id, owner, stream_id)
    assert api.on_loop(stream.send(number, (png(brightness, (40, 30)),), 1.0, ByteCharge(ByteBudget(1))))


def state(api: Api, token: Token | None, since: int = 0) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token.secret}"}
    status, found = api.call("GET", f"/console/state?since={since}", headers=headers)
    assert status == 200, found
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", CONSOLE_FILES)
def test_the_page_needs_no_token_and_allows_no_other_origin(api: Api, path: str) -> None:
    response = httpx.get(api.url + path)
    text = response.text
    assert response.status_code == 200 and len(text) > 1000
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text
    assert "style=" not in text and "onclick=" not in text


def test_data_requires_a_token_and_streams_are_visible_to_their_owner_and_to_admins(api: Api) -> None:
    for path in ("/console/state", "/console/adapters", "/console/streams/1/frame"):
        assert api.call("GET", path)[0] == api.call("GET", f"{path}?token={OPS.secret}")[0] == 401
        assert api.call("GET", path, headers={"Authorization": "Bearer wrong-token-0123456789"})[0] == 401
    seen = {token.name: [stream["owner"] for stream in state(api, token)["streams"]] for token in (CAMERAS, GUEST, OPS)}
    assert seen == {"cameras": ["cameras"], "guest": [], "ops": ["cameras", "ops"]}
    assert state(api, GUEST)["num_streams"] == 2
    assert [state(api, token)["admin"] for token in (GUEST, OPS)] == [False, True]


def test_a_frame_is_shown_to_its_owner_and_admins_while_viewed(api: Api, folder: Path) -> None:
    stream_id = open_stream(api, CAMERAS)
    number = state(api, CAMERAS)["streams"][-1]["number"]
    path = f"/console/streams/{number}/frame"

    def view(token: Token) -> int:
        return api.call("GET", path, headers={"Authorization": f"Bearer {token.secret}"})[0]

    send(api, stream_id, CAMERAS, 0)
    until(lambda: state(api, CAMERAS)["streams"][-1]["num_answered"] == 1)
    assert state(api, CAMERAS)["streams"][-1]["name"] == "gate"
    assert view(GUEST) == 404 and view(CAMERAS) == 204  # no frame was requested before, so none was drawn
    send(api, stream_id, CAMERAS, 1)
    until(lambda: api.front_end.streams.watched()[-1].preview.read() is not None)
    response = httpx.get(api.url + path, headers={"Authorization": f"Bearer {OPS.secret}"})
    picture = Image.open(io.BytesIO(response.content))
    assert (response.status_code, response.headers["Content-Type"]) == (200, "image/jpeg")
    assert response.headers["Cache-Control"] == "no-store"
    pixel = picture.getpixel((240, 140))
    assert picture.size == (480, 320) and isinstance(pixel, tuple) and pixel > (200, 200, 200)
    assert view(GUEST) == 404
    last = state(api, OPS)["streams"][-1]["last"]
    assert (last["number"], last["label"], last["problem"]) == (1, "bright", None)
    assert stream_id not in str(state(api, OPS)), "a stream's id allows resuming it"


def test_adapters_are_listed_and_a_dead_engine_is_its_cause(folder: Path) -> None:
    with running_api() as api:
        assert api.call("GET", "/console/adapters")[1] == [] and state(api, None)["admin"] is True
        api.on_loop(api.front_end.adapters.load("<b>cam", str(folder)))
        (found,) = api.call("GET", "/console/adapters")[1]
        assert found["name"] == "<b>cam" and found["heads"][0]["name"] == "night"
        api.engine.dead = "the engine process was killed by SIGKILL"
        until(lambda: api.call("GET", "/console/state")[0] == 503)  # after the last snapshot's time
        assert "SIGKILL" in api.call("GET", "/console/state")[1]["error"]["message"]


async def test_many_viewers_share_two_snapshots_per_second() -> None:
    taken: list[int] = []

    class Source(ScriptedInterface):
        async def snapshot(self, since: int = 0) -> EngineSnapshot:
            taken.append(since)
            await asyncio.sleep(0.01)
            self.engine.num_steps += 10
            return await super().snapshot(since)

    feed = SnapshotFeed(Source().snapshot, interval_s=0.2)
    first = await asyncio.gather(*(feed.read(0) for _ in range(50)))
    assert len(taken) == 1
    await asyncio.sleep(0.2)
    second = await asyncio.gather(*(feed.read(4) for _ in range(50)))
    found = [[step.number for step in steps] for _, steps in (first[-1], second[-1])]
    assert found == [list(range(1, 11)), list(range(5, 21))] and taken == [0, 10]


async def test_an_old_snapshot_of_a_dead_engine_is_not_shown_and_a_restarted_one_counts_from_one() -> None:
    source = ScriptedInterface()
    source.engine.num_steps = 40
    feed = SnapshotFeed(source.snapshot, interval_s=0.05)
    await feed.read(0)
    source.dead = "killed"
    await asyncio.sleep(0.06)
    for _ in range(3):  # the second read is within the interval
        with pytest.raises(EngineDead):
            await feed.read(0)
    source.dead = None
    source.engine.num_steps = 3
    await feed.read(0)
    await asyncio.sleep(0.06)
    assert [step.number for step in (await feed.read(0))[1]] == [1, 2, 3]


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(png(200, (1, 1)), id="one pixel"),
        pytest.param(png(200, (4000, 30)), id="wide"),
        pytest.param(png(200, (30, 2000)), id="high"),
        pytest.param(png(90, kind="TIFF", mode="CMYK"), id="CMYK"),
        pytest.param(RawImage(bytes(12), 2, 2), id="raw"),
    ],
)
def test_any_frame_that_was_answered_can_be_drawn(image: bytes | RawImage) -> None:
    label = "ночь 夜 " + "x" * 300
    boxes = (FoundBox(label=label, label_id=0, score=0.9, left=0, top=0, right=1, bottom=1),)
    named: dict[str, Any] = {"label": label, "labels": (label,), "adapter": "a", "head": "h"}
    answer = HeadResult(task="detection", confidence=0.5, boxes=boxes, timings=TIMINGS, total_s=0, **named)
    answers = (FrameAnswer(adapter="a", head="h", answer=answer),)
    result = FrameResult(number=0, latency_s=0.1, answers=answers)
    picture = draw(image, result, ServerConfig())
    assert Image.open(io.BytesIO(picture)).size == (480, 320) and len(picture) < 60_000
