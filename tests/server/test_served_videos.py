"""Videos as frames with times through `vlora serve`: RPyC and HTTP give the answers of the local engine."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.processors import write_checkpoint
from tests.server.served import Served, served
from tests.server.test_supervisor import call
from vlora.client import Video
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest
from vlora.models import InputProcessor
from vlora.models.vision.images import Clip
from vlora.types import Request, SamplingParams

pytestmark = pytest.mark.slow  # tests/models/test_videos.py is fast

QUESTION = "what is shown ?"
TIMES = (0.0, 0.5, 1.0, 1.5, 2.0)
NUM_TOKENS = 6


SERVED = (
    "qwen2_5_vl",
    *(pytest.param(family, marks=pytest.mark.exhaustive) for family in ("qwen2_vl", "qwen3_vl", "llava")),
)


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Served]:
    with served("--model", str(folder), "--dtype", "float32") as running:
        yield running


def frames(count: int = len(TIMES)) -> list[bytes]:
    encoded = []
    for seed in range(count):
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
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    request = Request(request_id="r", prompt_ids=encoded.prompt_ids, vision=encoded.vision, sampling=sampling)
    outputs = LocalEngine(EngineConfig(model=str(folder), dtype="float32")).run([request])["r"]
    return processor.decode([token for output in outputs for token in output.token_ids])


def chat(serving: Served, **video: Any) -> tuple[int, dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(frame).decode()}" for frame in frames()]
    parts = [
        {"type": "video", "video": urls, **video},
        {"type": "image_url", "image_url": {"url": urls[0]}},
        {"type": "text", "text": QUESTION},
    ]
    model = json.loads(call(serving.http_port, "GET", "/v1/models")[1])["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": NUM_TOKENS}
    status, text = call(serving.http_port, "POST", "/v1/chat/completions", {**body, "ignore_eos": True})
    return status, json.loads(text)


def test_a_video_over_both_wires(serving: Served, folder: Path) -> None:
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    shown: list[bytes | Video[bytes]] = [Video(frames(), TIMES), frames()[0]]
    if folder.name.startswith("llava"):
        with pytest.raises(BadRequest, match="takes no videos here; send their frames as images"):
            serving.client.generate(QUESTION, shown, **options)
        status, answer = chat(serving, times=TIMES)
        assert status == 400 and "takes no videos here" in answer["error"]["message"]
        return
    expected = expected_text(folder)
    assert expected and serving.client.generate(QUESTION, shown, **options).text == expected
    assert "".join(serving.client.stream(QUESTION, shown, **options)) == expected
    for video in ({"times": TIMES}, {"fps": 2.0}):
        status, answer = chat(serving, **video)
        assert status == 200 and answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("times", "message"),
    [((0.0, 1.0), "5 frames and 2 times"), ((0, 1, 2, 3, 2), "time 4 of a video is 2"), ((-1, 0, 1, 2, 3), "time 0")],
)
def test_times_that_do_not_fit_are_refused(serving: Served, times: tuple[float, ...], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        serving.client.generate(QUESTION, [Video(frames(), times)])
    status, answer = chat(serving, times=times)
    assert status == 400 and message in answer["error"]["message"]


def test_a_video_needs_either_times_or_fps(serving: Served) -> None:
    for video in ({}, {"times": TIMES, "fps": 2.0}):
        status, answer = chat(serving, **video)
        assert status == 400 and "the times of its frames in seconds, or their fps" in answer["error"]["message"]
