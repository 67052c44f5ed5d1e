"""Many pictures, one question: an answer for each, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps.image_query import ask_all, find_pictures
from apps.in_order import AT_ONCE
from tests.apps.scripted import refuse_to_list
from tests.server.running import Running, png, running_server
from vlora.client import Client
from vlora.errors import BadImage, BadRequest, Disconnected, UnknownAdapter, UnknownHead, VLoraError


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


def test_answers_come_in_order_and_a_bad_picture_ends_nothing(client: Client, pictures: Path) -> None:
    (pictures / "deep" / "last\udce9.png").write_bytes(png(230))  # a file name that is not UTF-8
    found = find_pictures([pictures])
    answers = list(ask_all(client, found, head="night", adapter="cam"))
    names = [str(path).replace("\udce9", "\ufffd") for path in found]
    assert [answer.image for answer in answers] == names and len(found) == 32
    assert msgspec.json.decode(msgspec.json.encode(answers[-1]))["image"].endswith("last\ufffd.png")
    expected = ["bright" if place % 3 else "dark" for place in range(30)] + ["bright"] * 2
    assert [answer.text for answer in answers] == [*expected[:7], "", *expected[8:]]
    assert answers[7].problem is not None and "image 1" in answers[7].problem and answers[7].answer is None
    assert all(answer.answer is not None for answer in answers if answer.problem is None)
    words = ask_all(client, found[:3], question="say:yes, it is", max_tokens=3)
    assert [answer.text for answer in words] == ["yes"] * 3
    stop = threading.Event()
    asked = ask_all(client, found, head="night", adapter="cam", stop=stop)
    assert next(asked).text == "dark"
    stop.set()
    assert len(list(asked)) == AT_ONCE - 1, "no more requests are sent"


def test_queries_that_cannot_be_sent_are_errors(
    client: Client, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    refuse_to_list(pictures / "deep", monkeypatch)
    errors: list[BadImage] = []
    assert len(find_pictures([pictures], errors.append)) == 30, "it does not end the others"
    assert [str(error) for error in errors] == [f"cannot read folder '{pictures / 'deep'}': Permission denied"]
    for path, message in (
        (pictures / "deep", r"cannot read folder '.*deep': Permission denied"),
        (tmp_path / "empty", "contains no picture"),
        (tmp_path / "nowhere", "no file or folder"),
        (Path("/dev/null"), "no file or folder"),
        (Path("what is shown ? " * 20), "cannot read 'what is shown .*': File name too long"),
    ):
        with pytest.raises(BadImage, match=message):
            find_pictures([path])
    wrong: tuple[tuple[dict[str, Any], type[VLoraError], str], ...] = (
        ({"question": "x", "adapter": "cam", "head": "night"}, BadRequest, "give a question, or a head"),
        ({}, BadRequest, "give a question, or a head"),
        ({"head": "night"}, BadRequest, "give a question, or a head"),
        ({"question": "x", "adapter": "zzz"}, UnknownAdapter, "registered: cam"),
        ({"adapter": "cam", "head": "day"}, UnknownHead, "its heads: night"),
    )
    for asked, kind, message in wrong:
        with pytest.raises(kind, match=message):
            list(ask_all(client, [pictures / "00.png"], **asked))
    with Client(port=1) as nobody, pytest.raises(Disconnected):
        list(ask_all(nobody, sorted(pictures.glob("*.png")), question="x"))
