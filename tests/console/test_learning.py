"""Trainings, their losses, and the versions of learning adapters in a browser. `make console-test` runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="`make console-test` installs it")

from playwright.sync_api import Browser, expect

from tests.console.test_page import Watched
from tests.learning.scripted_model import write_content
from tests.learning.test_doors import learn
from tests.server.api import Api, running_api
from tests.server.test_console import CAMERAS, OPS
from vlora.types import TrainingStatus

HOSTILE = "<img src=x onerror=alert(1)>"
TRAINING = TrainingStatus(
    name=f"signs.{HOSTILE}",
    state="running",
    step=40,
    num_steps=100,
    loss=0.25,
    held_out_before=2.5,
    losses=tuple(2.5 / (1 + step / 4) for step in range(40)),
)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tokens=(CAMERAS, OPS)) as made:
        made.on_loop(learn(made.front_end, made.engine, tmp_path))
        made.engine.engine.parts.trainings.statuses = lambda: (TRAINING,)
        other = write_content(tmp_path / "other", {}, "new")
        learner = made.front_end.learning.learners["signs"]  # type: ignore[union-attr]
        made.on_loop(learner.promote("ops", version=None, path=str(other), force=True))
        yield made


def opened(browser: Browser, api: Api, token: str) -> Watched:
    watched = Watched(browser, api)
    watched.page.fill("#token-field", token)
    watched.page.click("#token-form button")
    expect(watched.page.locator("#status")).to_have_text("live")
    return watched


def test_trainings_and_versions_are_shown_and_rolled_back(browser: Browser, api: Api) -> None:
    watched = opened(browser, api, OPS.secret)
    page = watched.page
    row = page.locator("#training-rows li")
    expect(row).to_contain_text(TRAINING.name)
    expect(row).to_contain_text("step 40 of 100")
    expect(row).to_contain_text("running · loss 0.250 · held out 2.500")
    assert page.locator("#learning img").count() == 0
    drawn = (
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((one) => one > 0)"
    )
    assert row.locator("canvas").evaluate(drawn)
    expect(row.locator("canvas")).to_have_attribute("aria-label", "losses from 2.500 to 0.233")
    versions = page.locator("#version-rows tr")
    expect(versions).to_have_text(
        [re.compile(r"signs\w{8}present.0 of 0"), re.compile(r"signs\w{8}previous.0 of 0Roll back")]
    )
    versions.nth(1).locator("button").click()
    expect(page.locator("#learning-summary")).to_have_text("rollback signs: done")
    expect(versions.nth(1)).to_contain_text("present")
    expect(versions.nth(0).locator("button")).to_have_text("Promote")
    wide, tall = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert (wide, tall) == (1280, 800)
    watched.close()


def test_a_user_sees_versions_and_changes_none(browser: Browser, api: Api) -> None:
    watched = opened(browser, api, CAMERAS.secret)
    expect(watched.page.locator("#version-rows tr")).to_have_count(2)
    assert watched.page.locator("#version-rows button:visible").count() == 0
    watched.close()


def test_without_trainings_there_is_no_panel(browser: Browser) -> None:
    with running_api() as plain:
        watched = Watched(browser, plain)
        expect(watched.page.locator("#status")).to_have_text("live")
        expect(watched.page.locator("#learning")).to_be_hidden()
        watched.close()
