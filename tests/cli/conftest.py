"""The `vlora` command in this process, and a scripted server for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vlora.cli
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter

Vlora = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vlora_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Vlora:
    """Run the command: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vlora", *args])
        with pytest.raises(SystemExit) as exit:
            vlora.cli.main()
        code = exit.value.code
        return (0 if code is None else int(code), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Adapters: cam with the heads night (2 frames) and day (1), signs without."""
    with running_server() as running:
        folder = tmp_path_factory.mktemp("adapters")
        running.on_loop(running.front_end.load_adapter("cam", write_adapter(folder / "cam", {"night": 2, "day": 1})))
        running.on_loop(running.front_end.load_adapter("signs", write_adapter(folder / "signs")))
        yield running


@pytest.fixture
def address(server: Running) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def image(tmp_path: Path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")
