"""The console's page, and an annotated video, in a real browser over a scripted engine. `make console-test` runs it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

pytest.importorskip("playwright", reason="`make console-test` installs it")

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from apps.video_analytics import find_sources, run
from tests.learning.scripted_model import write_content
from tests.learning.test_doors import learn
from tests.server.api import Api, running_api
from tests.server.running import png
from tests.server.scripted import write_adapter
from tests.server.test_console import CAMERAS, OPS, open_stream, send
from tests.video_files import shades, write_video
from vlora.engine.snapshot import EngineSnapshot
from vlora.types import TrainingStatus

HOSTILE = "<img src=x onerror=alert(1)>"
COLOURS = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) colours.add(data.slice(at, at + 4).join());
    return colours.size;
}"""
PHOTO = {"name": "photo.png", "mimeType": "image/png", "buffer": png(230, (64, 48))}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not (chromium := os.environ.get("CHROMIUM")):
        pytest.skip("a browser is a system package: `make console-test` finds it")
    with sync_playwright() as playwright:
        # Tests in a container run as root, and Chromium's sandbox does not work for root.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("console")
    return {
        "cam": write_adapter(folder / "cam", {"night": 1, "motion": 2}),
        HOSTILE: write_adapter(folder / "hostile", {HOSTILE: 1}),
    }


@pytest.fixture
def api(folders: dict[str, str]) -> Iterator[Api]:
    with running_api() as made:
        for name, path in folders.items():
            made.on_loop(made.front_end.adapters.load(name, path))
        yield made


class Watched:
    """A page, with a record of its errors and unwanted requests."""

    def __init__(
        self, browser: Browser, api: Api, *, size: tuple[int, int] = (1280, 800), dark: bool = False, token: str = ""
    ) -> None:
        """Waits until the page is live."""
        scheme: Literal["dark", "light"] = "dark" if dark else "light"
        self.page: Page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page.set_default_timeout(10_000)
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("console", self._on_console)
        self.url = api.url
        self.page.goto(api.url)
        if token:
            self.use(token)
        if token or not api.front_end.config.tokens:
            expect(self.page.locator("#status")).to_have_text("live")

    def use(self, token: str) -> None:
        self.page.fill("#token-field", token)
        self.page.click("#token-form button")

    def size(self) -> tuple[int, int]:
        """Width and height of the whole page."""
        found = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        return found[0], found[1]

    def _on_console(self, message: ConsoleMessage) -> None:
        # An error status that the page displays is not an error of the page.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def close(self) -> None:
        """Assert that the page requested no other origin and had no errors."""
        self.page.close()
        own = (self.url, "data:", f"blob:{self.url}")
        assert not [url for url in self.urls if not url.startswith(own)]
        assert not self.complaints


@pytest.fixture
def watched(browser: Browser, api: Api) -> Iterator[Watched]:
    made = Watched(browser, api)
    yield made
    made.close()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def ask(page: Page, question: str) -> None:
    page.fill("#ask-question", question)
    page.press("#ask-question", "Enter")


# -- live state -------------------------------------------------------------------------------------------------------


def test_every_panel_shows_the_engines_state(page: Page, api: Api) -> None:
    ask(page, "never")
    expect(page.locator("#queue-rows li").first).to_contain_text("base model")
    expect(page.locator("#queue-summary")).to_have_text("0 starving")
    assert "θ = 0.10 s" in (page.locator("#queue-rows .bar").first.get_attribute("title") or "")
    expect(page.locator("#figure-running")).to_have_text("1")
    expect(page.locator("#modes-summary")).to_have_text(
        re.compile(r"merged 3[34] % · mixed 3[34] % · unmerged 3[34] %")
    )
    expect(page.locator("#adapters-summary")).to_contain_text("of 2 on the device")
    page.click("#queue .help")
    expect(page.locator("#tip")).to_contain_text("At the mark θ (theta) it is starving")
    expect(page.locator("#arena-legend")).to_contain_text("KV cached")
    page.click("#ask-stop")
    expect(page.locator("#queue-rows")).to_have_text("no requests")
    expect(page.locator("#ask-note")).to_have_text("stopped")
    assert api.idle() and len(api.engine.engine.cancelled) == 1


def test_canvases_are_drawn_and_have_descriptions(page: Page) -> None:
    ask(page, "never")
    expect(page.locator("#modes-summary")).to_contain_text("merged")
    assert page.locator("#timeline").evaluate(COLOURS) >= 5  # three modes, background and text
    assert page.locator("#arena-map").evaluate(COLOURS) >= 4  # adapters, packed, KV in use, cached; free
    tip = page.locator("#tip")
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 20)
    expect(tip).to_contain_text("1 request, 1 token")
    page.locator("#arena-map").hover(position={"x": 5, "y": 5})
    expect(tip).to_have_text("page 0: cam")
    page.focus("#timeline")
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("step ")
    number = tip.text_content()
    page.keyboard.press("ArrowLeft")
    expect(tip).not_to_have_text(number or "")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.click("#ask-stop")


def test_what_is_free_or_unused_takes_no_room(watched: Watched, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """All adapters have a row; the memory's map is drawn only where something is in it."""
    page, snapshot = watched.page, api.front_end.engine.snapshot
    expect(page.locator("#arena-map")).to_be_visible()

    async def unused(since: int = 0) -> EngineSnapshot:
        found = await snapshot(since)
        free = msgspec.structs.replace(found.arena, cells="f" * len(found.arena.cells), runs=())
        return msgspec.structs.replace(found, adapters=(), arena=free)

    monkeypatch.setattr(api.front_end.engine, "snapshot", unused)
    expect(page.locator("#arena-legend")).to_have_text("all free: no adapter is loaded, no request runs")
    expect(page.locator("#arena-map")).to_be_hidden()
    rows = page.locator("#adapter-rows tr")
    unknown = chr(0x2013)  # an en dash
    expect(rows).to_have_text([f"{name}disk0.00{unknown}{unknown}" for name in (HOSTILE, "cam")])
    expect(page.locator("#adapters-summary")).to_have_text("0 of 2 on the device")


def test_an_adapter_is_loaded_pinned_and_unloaded(page: Page, api: Api, tmp_path: Path) -> None:
    page.click("#admin summary")

    def do(what: str, name: str) -> None:
        page.fill("#admin-name", name)
        page.click(f"#admin-form button[value={what}]")

    def pinned() -> dict[str, bool]:
        return {status.name: status.pinned for status in api.on_loop(api.front_end.adapters.list())}

    page.fill("#admin-path", write_adapter(tmp_path / "signs", {"kind": 1}))
    do("load", "signs")
    expect(page.locator("#admin-note")).to_have_text("load signs: done")
    expect(page.locator("#ask-adapter option")).to_have_count(7)  # with the base model and three domains
    do("pin", "signs")
    expect(page.locator("#admin-note")).to_have_text("pin signs: done")
    assert pinned()["signs"]
    do("unpin", "signs")
    expect(page.locator("#admin-note")).to_have_text("unpin signs: done")
    assert not pinned()["signs"]
    do("unload", HOSTILE)
    expect(page.locator("#admin-note")).to_have_text(f"unload {HOSTILE}: done")
    assert set(pinned()) == {"cam", "signs"}
    page.fill("#admin-path", str(tmp_path / "nothing"))
    do("load", "nothing")
    expect(page.locator("#admin-note")).to_contain_text("no adapter_config.json")


def test_adapter_names_are_shown_as_text_only(page: Page, api: Api) -> None:
    send(api, open_stream(api, None), None, 0)
    expect(page.locator("#adapter-rows")).to_contain_text(HOSTILE)
    page.select_option("#ask-adapter", label=HOSTILE)
    page.select_option("#ask-head", label=f"head {HOSTILE} (classification)")
    page.set_input_files("#ask-files", PHOTO)  # type: ignore[arg-type]
    page.click("#ask-send")
    expect(page.locator("#answer .text")).to_have_text("bright")
    assert page.locator("#adapters img, #queue img, #answer img").count() == 0


def test_streams_show_their_preview(page: Page, api: Api) -> None:
    expect(page.locator("#stream-cards")).to_have_text("no stream is open")
    stream_id = open_stream(api, None)
    card = page.locator(".card")
    expect(card).to_contain_text("waiting for frames")
    done = threading.Event()

    def camera() -> None:
        number = 0
        while not done.wait(0.1):
            send(api, stream_id, None, number)
            number += 1

    thread = threading.Thread(target=camera)
    thread.start()
    try:
        expect(card.locator(".says")).to_have_text(re.compile(r"bright \d\d % · .+"))
        expect(card.locator("img")).to_have_js_property("naturalWidth", 480)
        expect(card.locator(".name")).to_have_text("gate")
        expect(card.locator(".whose")).to_have_text("night / cam")
        card.evaluate("card => { card.style.width = '4rem' }")
        assert card.locator(".whose").evaluate("each => each.scrollWidth <= each.clientWidth"), "all its tasks are read"
    finally:
        done.set()
        thread.join()
    api.loop.call_soon_threadsafe(api.front_end.streams.discard, stream_id)
    expect(page.locator("#stream-cards")).to_have_text("no stream is open")


def test_a_dead_engine_is_shown_and_no_error_is_thrown(browser: Browser, api: Api) -> None:
    watched = Watched(browser, api)
    api.engine.dead = "the engine process was killed by SIGKILL"
    expect(watched.page.locator("#status")).to_contain_text("SIGKILL")
    for place, opacity in (("#figures", "0.45"), ("#queue", "0.45"), ("#ask", "1")):
        expect(watched.page.locator(place)).to_have_css("opacity", opacity)
    ask(watched.page, "say:x")
    expect(watched.page.locator("#answer .problem")).to_contain_text("SIGKILL")
    api.engine.dead = None
    expect(watched.page.locator("#status")).to_have_text("live")
    expect(watched.page.locator("#figures")).to_have_css("opacity", "1")
    watched.close()


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_text_answer_is_streamed(page: Page) -> None:
    page.set_input_files("#ask-files", [PHOTO, PHOTO])  # type: ignore[arg-type]
    expect(page.locator("#ask-previews img")).to_have_count(2)
    page.select_option("#ask-adapter", label="cam")
    ask(page, "say:grün <b>&amp;")
    expect(page.locator("#answer .text")).to_have_text("grün <b>&amp;")
    expect(page.locator("#ask-note")).to_contain_text("15 tokens · ")
    page.click("#ask-clear")
    expect(page.locator("#ask-previews img")).to_have_count(0)
    expect(page.locator("#answer")).to_be_empty()


def test_a_head_answers_with_every_label(page: Page) -> None:
    page.select_option("#ask-adapter", label="cam")
    page.select_option("#ask-head", label="head night (classification)")
    expect(page.locator("#ask-question")).to_be_disabled()
    page.set_input_files("#ask-files", PHOTO)  # type: ignore[arg-type]
    page.click("#ask-send")
    expect(page.locator("#answer .scores")).to_have_text(re.compile(r"bright9\d\.\d %dark\d\.\d %"))
    page.select_option("#ask-head", label="head motion (classification, 2 images)")
    page.click("#ask-send")
    expect(page.locator("#answer .problem")).to_contain_text("reads 2 images per request; got 1")


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_is_requested_and_is_in_no_url(browser: Browser, folders: dict[str, str]) -> None:
    with running_api(tokens=(CAMERAS, OPS)) as api:
        api.on_loop(api.front_end.adapters.load("cam", folders["cam"]))
        for owner in (CAMERAS, OPS):
            open_stream(api, owner)
        watched = Watched(browser, api)
        page = watched.page
        expect(page.locator("#token-dialog")).to_be_visible()
        watched.use("not-one-of-this-server")
        expect(page.locator("#token-problem")).to_contain_text("not valid on this server")
        watched.use(CAMERAS.secret)
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#streams-summary")).to_have_text("1 stream · 1 of others")
        expect(page.locator("#admin")).to_be_hidden()
        ask(page, "say:yes")
        expect(page.locator("#answer .text")).to_have_text("yes")
        page.reload()
        expect(page.locator("#status")).to_have_text("live")
        page.evaluate("() => sessionStorage.clear()")
        page.reload()
        expect(page.locator("#token-dialog")).to_be_visible()
        watched.use(OPS.secret)
        expect(page.locator("#streams-summary")).to_have_text("2 streams")
        expect(page.locator("#admin")).to_be_visible()
        assert not [url for url in watched.urls for token in (CAMERAS, OPS) if token.secret in url]
        watched.close()


# -- layout and colours -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1280, 800), (820, 1100), (390, 844)])
def test_the_page_fits_desktops_and_phones(browser: Browser, api: Api, size: tuple[int, int]) -> None:
    watched = Watched(browser, api, size=size)
    page = watched.page
    expect(page.locator("#adapter-rows tr")).to_have_count(2)
    wide, tall = watched.size()
    assert wide == size[0] and (wide < 1280 or tall == size[1])
    for section in ("modes", "queue", "arena", "adapters", "streams", "ask"):
        box = page.locator(f"#{section}").bounding_box()
        assert box is not None and box["width"] >= 330 and box["height"] >= 60, section
    expect(page.locator("#learning")).to_be_hidden()  # there are no trainings
    watched.close()


def test_the_page_follows_the_systems_dark_mode(browser: Browser, api: Api) -> None:
    for dark, ground in ((False, "rgb(244, 245, 247)"), (True, "rgb(16, 20, 26)")):
        watched = Watched(browser, api, dark=dark)
        expect(watched.page.locator("body")).to_have_css("background-color", ground)
        watched.close()


def test_everything_is_reachable_by_keyboard(page: Page) -> None:
    expect(page.locator("#adapter-rows tr")).to_have_count(2)
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id"))
    assert reached >= {"timeline", "queue-rows", "stream-cards", "ask-adapter", "ask-head", "ask-files", "ask-question"}
    assert reached >= {"ask-send", "ask-clear"}


# -- trainings and versions -------------------------------------------------------------------------------------------


TRAINING = TrainingStatus(
    name=f"signs.{HOSTILE}",
    state="running",
    step=40,
    num_steps=100,
    loss=0.25,
    held_out_before=2.5,
    losses=tuple(2.5 / (1 + step / 4) for step in range(40)),
)


def test_trainings_and_versions_are_shown_to_users_and_rolled_back_by_operators(
    browser: Browser, tmp_path: Path
) -> None:
    with running_api(tokens=(CAMERAS, OPS)) as api:
        api.on_loop(learn(api.front_end, api.engine, tmp_path))
        api.engine.engine.parts.trainings.statuses = lambda: (TRAINING,)
        other = write_content(tmp_path / "other", {}, "new")
        learner = api.front_end.learning.learners["signs"]  # type: ignore[union-attr]
        api.on_loop(learner.promote("ops", version=None, path=str(other), force=True))
        watched = Watched(browser, api, token=CAMERAS.secret)
        expect(watched.page.locator("#version-rows tr")).to_have_count(2)
        assert watched.page.locator("#version-rows button:visible").count() == 0
        watched.close()
        watched = Watched(browser, api, token=OPS.secret)
        page = watched.page
        row = page.locator("#training-rows li")
        for text in (TRAINING.name, "step 40 of 100", "running · loss 0.250 · held out 2.500"):
            expect(row).to_contain_text(text)
        assert page.locator("#learning img").count() == 0
        assert row.locator("canvas").evaluate(COLOURS) > 1
        expect(row.locator("canvas")).to_have_attribute("aria-label", "losses from 2.500 to 0.233")
        versions = page.locator("#version-rows tr")
        expect(versions).to_have_text(
            [re.compile(r"signs\w{8}present.0 of 0"), re.compile(r"signs\w{8}previous.0 of 0Roll back")]
        )
        versions.nth(1).locator("button").click()
        expect(page.locator("#learning-summary")).to_have_text("rollback signs: done")
        expect(versions.nth(1)).to_contain_text("present")
        expect(versions.nth(0).locator("button")).to_have_text("Promote")
        assert watched.size() == (1280, 800)
        watched.close()


PLAY = """async video => {
    video.muted = true;
    await video.play();
    await new Promise(resolve => video.addEventListener("ended", resolve));
    return [video.videoWidth, video.videoHeight, video.currentTime];
}"""


def test_a_browser_plays_an_annotated_video(browser: Browser, api: Api, tmp_path: Path) -> None:
    video = write_video(tmp_path / "street.mp4", shades(2))
    with api.client() as client:
        run(client, find_sources([str(video)]), "cam", "night", out=tmp_path / "results")
    page = browser.new_page()
    page.goto((tmp_path / "results" / "street.webm").as_uri())
    width, height, seconds = page.locator("video").evaluate(PLAY)
    page.close()
    assert (width, height) == (512, 432) and seconds == pytest.approx(2.0, abs=0.2)
