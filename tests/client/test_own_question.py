"""The task head that a text question selects."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.running import running_server
from tests.server.scripted import write_adapter
from vlora.client import AsyncClient, Client
from vlora.client.calls import head_of_question
from vlora.types import AdapterStatus, HeadSummary


def head(name: str, prompt: str, num_frames: int = 1) -> HeadSummary:
    return HeadSummary(name=name, task="classification", labels=("a", "b"), prompt=prompt, num_frames=num_frames)


def adapter(name: str, *heads: HeadSummary) -> AdapterStatus:
    return AdapterStatus(
        name=name,
        version="",
        rank=4,
        num_bytes=1,
        resident=False,
        mergeable=True,
        merge_fidelity=1.0,
        touches_vision=False,
        heads=heads,
    )


CAMS = (
    adapter("cam", head("sign", "what sign ?"), head("clip", "what happens ?", 4), head("kind", "what kind ?")),
    adapter("twins", head("one", "what sign ?"), head("two", "what sign ?")),
    adapter("plain"),
    adapter("single", head("only", "what\nsign ?")),
)


@pytest.mark.parametrize(
    ("name", "question", "num_images", "wanted"),
    [
        ("cam", "what sign ?", 1, "sign"),
        ("cam", "  what \n sign ? ", 1, "sign"),
        ("single", "what sign ?", 1, "only"),
        ("cam", "What sign ?", 1, None),
        ("cam", "what sign", 1, None),
        ("cam", "what sign ?", 2, None),
        ("cam", "what happens ?", 4, "clip"),
        ("cam", "", 1, None),  # two heads read one picture
        ("cam", "", 4, "clip"),
        ("single", " ", 1, "only"),
        ("twins", "what sign ?", 1, None),
        ("plain", "what sign ?", 1, None),
        ("unknown", "what sign ?", 1, None),
    ],
)
def test_the_only_head_for_a_question(name: str, question: str, num_images: int, wanted: str | None) -> None:
    assert head_of_question(CAMS, question, num_images, name) == wanted


def test_clients_look_the_head_up_on_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server() as running:
        folder = write_adapter(tmp_path_factory.mktemp("adapters") / "cam", {"day": 1})
        running.on_loop(running.front_end.adapters.load("cam", folder))
        with Client(port=running.port) as client:
            assert client.head_of("is it day?", "cam") == "day" and client.head_of("is it day?", None) is None

        async def ask() -> str | None:
            async with AsyncClient(port=running.port) as asking:
                return await asking.head_of("is it day?", "cam")

        assert asyncio.run(ask()) == "day"
