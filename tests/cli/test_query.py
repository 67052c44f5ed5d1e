"""`vlora query`: several pictures, pictures by URL, task heads."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import vlora.cli.fetching
from tests.cli.conftest import Vlora
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter

PAGES = {
    "/a.png": ("image/png", png(250)),
    "/typeless": ("application/octet-stream", png(250)),
    "/page": ("text/html", b"<html>"),
    "/large.png": ("image/png", bytes(2000)),
}


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, body = PAGES.get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{pages.server_port}"
        pages.shutdown()


@pytest.fixture
def bright(tmp_path: Path) -> str:
    (tmp_path / "bright.png").write_bytes(png(250))
    return str(tmp_path / "bright.png")


def test_the_last_argument_is_the_question_unless_it_is_a_picture(
    vlora_command: Vlora, address: str, image: str, bright: str
) -> None:
    at = ("--server", address, "--json")
    lengths = []
    for args in ((image, "say:x"), (image, bright, "say:x"), (image, bright, "-q", "say:x")):
        code, out, err = vlora_command("query", *args, *at)
        assert (code, err) == (0, "") and json.loads(out)["text"] == "x"
        lengths.append(json.loads(out)["num_prompt_tokens"])
    assert lengths[0] < lengths[1] == lengths[2], "the second picture is in the prompt"
    code, _, err = vlora_command("query", image, bright, *at)
    assert code == 2 and "the base model has no default question" in err
    code, out, _ = vlora_command("query", image, "say:" + "x" * 5000, *at)
    assert code == 0 and json.loads(out)["text"].startswith("xxx"), "a question may be longer than a file's name"


def test_a_head_answers_with_its_label(
    vlora_command: Vlora, address: str, image: str, bright: str, tmp_path: Path
) -> None:
    (tmp_path / "dark.png").write_bytes(png(10))
    at = ("--adapter", "cam", "--server", address)
    code, out, err = vlora_command("query", bright, "--head", "day", *at)
    assert (code, err) == (0, "") and out == "bright  98.0%\n"
    code, out, _ = vlora_command("query", str(tmp_path / "dark.png"), bright, "--head", "night", *at, "--json")
    assert code == 0 and json.loads(out)["label"] == "dark"
    code, _, err = vlora_command("query", image, "--head", "night", *at)
    assert code == 2 and "head 'night'" in err and "2 images" in err


def test_a_question_of_a_head_is_answered_by_the_head_with_a_note(
    vlora_command: Vlora, address: str, image: str, bright: str
) -> None:
    at = ("--adapter", "cam", "--server", address)
    for question in (("is it day?",), (" is  it day?\n", "--max-tokens", "8"), ()):  # also an adapter's own question
        assert vlora_command("query", bright, *question, *at) == (0, "bright  98.0%  (head day)\n", "")
    code, out, _ = vlora_command("query", bright, "is it day?", *at, "--json")
    assert code == 0 and (json.loads(out)["head"], json.loads(out)["label"]) == ("day", "bright")


@pytest.mark.parametrize(
    "args",
    [
        ("is it day?", "--words"),
        ("is it day?", "--temperature", "0.5"),
        ("is it day?", "--stop", "x"),
        ("is it day?", "--max-ttft-s", "60"),
        ("is it night?",),  # that head reads two pictures
        ("Is it day?",),
    ],
)
def test_other_questions_and_the_words_flag_generate_text(
    vlora_command: Vlora, address: str, bright: str, args: tuple[str, ...]
) -> None:
    code, out, err = vlora_command("query", bright, *args, "--adapter", "cam", "--server", address, "--json")
    assert (code, err) == (0, "") and "text" in json.loads(out) and "head" not in json.loads(out)


def test_the_words_flag_and_a_head_exclude_each_other(vlora_command: Vlora, address: str, bright: str) -> None:
    code, _, err = vlora_command("query", bright, "--words", "--head", "day", "--adapter", "cam", "--server", address)
    assert code == 2 and "leave out --words or --head" in err


def test_boxes_of_a_detection_are_listed(vlora_command: Vlora, bright: str, image: str, tmp_path: Path) -> None:
    with running_server() as running:
        folder = write_adapter(tmp_path / "cars", {"detection": 1})
        running.on_loop(running.front_end.adapters.load("cars", folder))
        at = ("--adapter", "cars", "--head", "detection", "--server", f"127.0.0.1:{running.port}")
        code, out, _ = vlora_command("query", bright, *at)
    assert code == 0
    label, box = out.splitlines()
    assert label == "bright  98.0%" and box.startswith("  bright  98.0%  [0, ")


def test_a_picture_by_url_is_fetched(vlora_command: Vlora, server: Running, site: str, bright: str) -> None:
    at = ("--adapter", "cam", "--head", "day", "--server", f"127.0.0.1:{server.port}")
    for address in (f"{site}/a.png", f"{site}/typeless", f"{site.replace('http', 'HTTP')}/a.png"):
        assert vlora_command("query", address, *at) == (0, "bright  98.0%\n", "")
    assert vlora_command("query", f"{site}/a.png", bright, "say:x", *at[4:]) == (0, "x\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["SITE/none.png"], "the picture cannot be fetched from '127.0.0.1': status 404"),
        (["SITE/page"], "'127.0.0.1' sent 'text/html'; an image is expected"),
        (["SITE/large.png"], "the picture from '127.0.0.1' has over 1000 bytes; send a smaller one"),
        (["http://127.0.0.1:1/a.png"], "the picture cannot be fetched from '127.0.0.1': Connection refused"),
        (["http://127.0.0.1:many/a.png"], "the picture cannot be fetched from 'http://127.0.0.1:many/a.png'; check"),
        (["http://[/a.png"], "the picture cannot be fetched from 'http://[/a.png'; check the URL"),
        (["IMAGE", "--head", "day"], "--head is 'day'; also give its --adapter"),
        (
            ["IMAGE", "--head", "day", "--adapter", "cam", "--max-tokens", "8"],
            "--max-tokens has no effect on a task head's answer; leave out --max-tokens or --head",
        ),
        (["IMAGE", "What?", "--head", "day", "--adapter", "cam"], "cannot read image 'What?': No such file"),
        (["IMAGE", "--head", "zzz", "--adapter", "cam"], "adapter 'cam' has no head 'zzz'; its heads: "),
    ],
)
def test_errors_are_one_line(
    vlora_command: Vlora,
    address: str,
    site: str,
    image: str,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(vlora.cli.fetching, "MAX_BYTES", 1000)
    given = [arg.replace("SITE", site).replace("IMAGE", image) for arg in args]
    code, out, err = vlora_command("query", *given, "--server", address)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_an_unresponsive_site_times_out(vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlora.cli.fetching, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        code, _, err = vlora_command("query", url, "--server", address)
    assert code == 2 and "cannot be fetched from '127.0.0.1': no answer within 0.2 s" in err
