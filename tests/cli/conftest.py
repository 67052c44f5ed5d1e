"""The `vlora` command in this process, and a scripted server for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vlora.cli
from tests.server.running import Running, png, running_server

Vlora = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vlora_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Vlora:
    """Run the command: exit code, stdout, stderr.

    What it does to the loggers ends with the test: its handler writes to a stream that is closed then.
    """
    for name in ("vlora", "atmm"):
        logger = logging.getLogger(name)
        for field, value in (("handlers", []), ("propagate", True), ("level", logging.NOTSET)):
            monkeypatch.setattr(logger, field, value)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vlora", *args])
        with pytest.raises(SystemExit) as exit:
            vlora.cli.main()
        code = exit.value.code
        return (0 if code is None else int(code), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "day": 1}, "signs": {}}) as running:
        yield running


@pytest.fixture
def address(server: Running) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def image(tmp_path: Path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")
