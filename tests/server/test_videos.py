"""Videos as frames with times: RPyC and HTTP give the answers of the engine."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.processors import write_checkpoint
from tests.server.api import Api, data_url, running_api
from vlora.client import Video
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest
from vlora.models.processing import InputProcessor
from vlora.models.vision.images import Clip
from vlora.types import Request, SamplingParams

QUESTION = "what is shown ?"
TIMES = (0.0, 0.5, 1.0, 1.5, 2.0)
SAMPLING: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    write_checkpoint(folder, "qwen2_5_vl")
    return folder


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    engine = LocalEngine(EngineConfig(model=str(folder), dtype="float32"))
    with running_api(engine, InputProcessor.from_pretrained(str(folder))) as made:
        yield made
        made.on_loop(engine.close())


def frames() -> list[bytes]:
    encoded = []
    for seed in range(len(TIMES)):
        stream = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 255, (32, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "PNG")
        encoded.append(stream.getvalue())
    return encoded


def expected_text(folder: Path) -> str:
    processor = InputProcessor.from_pretrained(str(folder))
    pictures = [Image.open(io.BytesIO(frame)) for frame in frames()]
    encoded = processor.encode(processor.ask(QUESTION, ["video", "image"]), [Clip(pictures, TIMES), pictures[0]])
    assert [item.kind for item in encoded.vision] == ["video", "image"]
    sampling = SamplingParams(**SAMPLING)
    asked = Request(request_id="r", prompt_ids=encoded.prompt_ids, vision=encoded.vision, sampling=sampling)
    outputs = LocalEngine(EngineConfig(model=str(folder), dtype="float32")).run([asked])["r"]
    return processor.decode([token for output in outputs for token in output.token_ids])


def chat(api: Api, **video: Any) -> tuple[int, dict[str, Any]]:
    urls = list(map(data_url, frames()))
    parts = [{"type": "video", "video": urls, **video}, {"type": "image_url", "image_url": {"url": urls[0]}}]
    return api.chat([*parts, {"type": "text", "text": QUESTION}], **SAMPLING)


def test_a_video_over_both_wires(api: Api, folder: Path) -> None:
    shown: list[bytes | Video[bytes]] = [Video(frames(), TIMES), frames()[0]]
    with api.client() as client:
        expected = expected_text(folder)
        assert expected and client.generate(QUESTION, shown, **SAMPLING).text == expected
        assert "".join(client.stream(QUESTION, shown, **SAMPLING)) == expected
    for video in ({"times": TIMES}, {"fps": 2.0}):
        status, answer = chat(api, **video)
        assert status == 200 and answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("times", "message"),
    [((0.0, 1.0), "5 frames and 2 times"), ((0, 1, 2, 3, 2), "time 4 of a video is 2"), ((-1, 0, 1, 2, 3), "time 0")],
)
def test_times_that_do_not_fit_are_refused(api: Api, times: tuple[float, ...], message: str) -> None:
    with api.client() as client, pytest.raises(BadRequest, match=message):
        client.generate(QUESTION, [Video(frames(), times)])
    status, answer = chat(api, times=times)
    assert status == 400 and message in answer["error"]["message"]
    for video in ({}, {"times": TIMES, "fps": 2.0}):
        status, answer = chat(api, **video)
        assert status == 400 and "the times of its frames in seconds, or their fps" in answer["error"]["message"]
