"""Many pictures, one question: an answer for each, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from apps.image_query import ask_all, find_pictures
from apps.in_order import AT_ONCE
from tests.apps.scripted import refuse_to_list
from tests.server.running import Running, png, running_server
from vlora.client import Client
from vlora.errors import BadImage, BadRequest, Disconnected, UnknownAdapter, UnknownHead


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 1}}) as running:
        yield running


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for place in range(30):
        (folder / f"{place:02}.png").write_bytes(png(230 if place % 3 else 20))
    (folder / "07.png").write_bytes(b"no picture")
    (folder / "deep" / "last.JPG").write_bytes(png(230, kind="JPEG"))
    (folder / "notes.txt").write_text("no picture either")
    return folder


def test_answers_come_in_order_and_a_bad_picture_ends_nothing(server: Running, pictures: Path) -> None:
    found = find_pictures([pictures])
    with Client(port=server.port) as client:
        answers = list(ask_all(client, found, head="night", adapter="cam"))
        words = list(ask_all(client, found[:3], question="say:yes, it is", max_tokens=3))
    assert [answer.image for answer in answers] == [str(path) for path in found] and len(found) == 31
    expected = ["bright" if place % 3 else "dark" for place in range(30)] + ["bright"]
    assert [answer.text for answer in answers] == [*expected[:7], "", *expected[8:]]
    assert answers[7].problem is not None and "image 1" in answers[7].problem and answers[7].answer is None
    assert all(answer.answer is not None for answer in answers if answer.problem is None)
    assert [answer.text for answer in words] == ["yes"] * 3


def test_a_file_name_that_is_not_utf8_can_be_written(server: Running, tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.png").write_bytes(png(230))
    with Client(port=server.port) as client:
        (answer,) = ask_all(client, find_pictures([tmp_path]), head="night", adapter="cam")
    assert answer.text == "bright" and msgspec.json.decode(msgspec.json.encode(answer))["image"].endswith(
        "caf\ufffd.png"
    )


def test_a_folder_that_cannot_be_read_does_not_end_the_others(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_list(pictures / "deep", monkeypatch)
    errors: list[BadImage] = []
    assert len(find_pictures([pictures], errors.append)) == 30
    assert [str(error) for error in errors] == [f"cannot read folder '{pictures / 'deep'}': Permission denied"]
    with pytest.raises(BadImage, match=r"cannot read folder '.*deep': Permission denied"):
        find_pictures([pictures / "deep"])


def test_after_stop_no_more_requests_are_sent(server: Running, pictures: Path) -> None:
    stop = threading.Event()
    with Client(port=server.port) as client:
        answers = ask_all(client, find_pictures([pictures]), head="night", adapter="cam", stop=stop)
        first = next(answers)
        stop.set()
        rest = list(answers)
    assert first.text == "dark" and len(rest) == AT_ONCE - 1


def test_queries_that_cannot_be_sent_are_errors(server: Running, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "contains no picture"),
        (tmp_path / "nowhere", "no file or folder"),
        (Path("/dev/null"), "no file or folder"),
        (Path("what is shown ? " * 20), "cannot read 'what is shown .*': File name too long"),
    ):
        with pytest.raises(BadImage, match=message):
            find_pictures([path])
    for question, adapter, head in (("x", "cam", "night"), (None, None, None), (None, None, "night")):
        with Client(port=server.port) as client, pytest.raises(BadRequest, match="give a question, or a head"):
            next(ask_all(client, [], question=question, adapter=adapter, head=head))
    with Client(port=1) as client, pytest.raises(Disconnected):
        list(ask_all(client, find_pictures([pictures]), question="x"))
    with Client(port=server.port) as client:
        with pytest.raises(UnknownAdapter, match="registered: cam"):
            list(ask_all(client, find_pictures([pictures]), question="x", adapter="zzz"))
        with pytest.raises(UnknownHead, match="its heads: night"):
            list(ask_all(client, find_pictures([pictures]), adapter="cam", head="day"))
