"""One browser for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = os.environ.get("CHROMIUM")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("a browser is a system package: `make console-test` finds it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Tests in a container run as root, and Chromium's sandbox does not work for root.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
