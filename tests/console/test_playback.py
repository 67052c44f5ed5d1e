"""Playback of an annotated video in a browser. `make console-test` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="`make console-test` installs it")

from playwright.sync_api import Browser

from apps.video_analytics import find_sources, run
from tests.server.running import running_server
from tests.server.scripted import write_adapter
from tests.video_files import shades, write_video
from vlora.client import Client

PLAY = """async video => {
    video.muted = true;
    await video.play();
    await new Promise(resolve => video.addEventListener("ended", resolve));
    return [video.videoWidth, video.videoHeight, video.currentTime];
}"""


def test_a_browser_plays_the_annotated_video(browser: Browser, tmp_path: Path) -> None:
    with running_server() as server, Client(port=server.port) as client:
        server.on_loop(server.front_end.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1})))
        video = write_video(tmp_path / "street.mp4", shades(2))
        run(client, find_sources([str(video)]), "cam", "night", out=tmp_path / "results")
    page = browser.new_page()
    page.goto((tmp_path / "results" / "street.webm").as_uri())
    width, height, seconds = page.locator("video").evaluate(PLAY)
    page.close()
    assert (width, height) == (512, 432) and seconds == pytest.approx(2.0, abs=0.2)
