"""The `vlora` command in this process, a scripted server for it, and a folder of its inputs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vlora.cli
from tests.server.running import Running, png, running_server
from tests.video_files import write_video


class Vlora:
    """Runs the command: exit code, stdout, stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *args: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["vlora", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            vlora.cli.main()
        return (int(exit.value.code or 0), *self._capfd.readouterr())

    def out(self, *args: object, code: int = 0) -> str:
        """The output of a command that writes nothing on stderr."""
        found = self(*args)
        assert (found[0], found[2]) == (code, ""), found
        return found[1]

    def json(self, *args: object, code: int = 0) -> list[Any]:
        """The lines of its output, which are JSON."""
        return [json.loads(line) for line in self.out(*args, "--json", code=code).splitlines()]

    def refusal(self, *args: object) -> str:
        """The only line of a user error."""
        code, out, error = self(*args)
        # The tests have imported OpenCV before vlora.opencv could disable its and FFmpeg's own output.
        own = ("moov atom not found", "VIDEOIO")
        (line,) = (line for line in error.splitlines() if not any(text in line for text in own))
        assert (code, out) == (2, "") and line.startswith("error: "), (args, error)
        return line.removeprefix("error: ")


@pytest.fixture
def vlora_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Vlora:
    """What the command does to the loggers ends with the test: its handler writes to a stream that is closed then."""
    for name in ("vlora", "atmm"):
        for field, value in (("handlers", []), ("propagate", True), ("level", logging.NOTSET)):
            monkeypatch.setattr(logging.getLogger(name), field, value)
    return Vlora(monkeypatch, capfd)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "day": 1}, "signs": {}}) as running:
        yield running


@pytest.fixture
def address(server: Running) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def asking(vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch) -> Vlora:
    """Commands for the scripted server, which its address in the environment names."""
    monkeypatch.setenv("VLORA_SERVER", address)
    return vlora_command


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with pictures and videos: two dark seconds, one bright, and a bright rest."""
    (tmp_path / "videos").mkdir()
    for name, brightness in (("a.png", 200), ("dark.png", 10), ("bright.png", 250)):
        (tmp_path / name).write_bytes(png(brightness))
    write_video(tmp_path / "videos" / "street.mp4", [20, 230])
    write_video(tmp_path / "video.mp4", [20, 20, 230], rest=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def image(tmp_path: Path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")
