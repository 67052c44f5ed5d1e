"""Videos as frames with times, and as files: RPyC and HTTP give the answers of the engine."""

from __future__ import annotations

import functools
import io
import itertools
import math
import random
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.processes import until
from tests.processors import write_checkpoint
from tests.server.api import Api, data_url, running_api
from tests.server.running import noise, png
from tests.video_files import NIGHT, write_times
from vlora.client import Video, VideoFile
from vlora.config import EngineConfig, Token
from vlora.engine import LocalEngine
from vlora.errors import BadRequest
from vlora.models.processing import InputProcessor
from vlora.models.vision.images import Clip
from vlora.server import images as image_sources
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
    return [noise(seed, (32, 40)) for seed in range(len(TIMES))]


@functools.cache
def alone(folder: Path) -> tuple[InputProcessor, LocalEngine]:
    return InputProcessor.from_pretrained(str(folder)), LocalEngine(EngineConfig(model=str(folder), dtype="float32"))


def expected_text(folder: Path, *shown: Clip | Image.Image) -> str:
    processor, engine = alone(folder)
    kinds = ["video" if isinstance(one, Clip) else "image" for one in shown]
    encoded = processor.encode(processor.ask(QUESTION, kinds), shown)
    assert [item.kind for item in encoded.vision] == kinds
    sampling = SamplingParams(**SAMPLING)
    asked = Request(request_id="r", prompt_ids=encoded.prompt_ids, vision=encoded.vision, sampling=sampling)
    outputs = engine.run([asked])["r"]
    return processor.decode([token for output in outputs for token in output.token_ids])


def chat(api: Api, **video: Any) -> tuple[int, dict[str, Any]]:
    urls = list(map(data_url, frames()))
    parts = [{"type": "video", "video": urls, **video}, {"type": "image_url", "image_url": {"url": urls[0]}}]
    return api.chat([*parts, {"type": "text", "text": QUESTION}], **SAMPLING)


def test_a_video_over_both_wires(api: Api, folder: Path) -> None:
    shown: list[bytes | Video[bytes]] = [Video(frames(), TIMES), frames()[0]]
    with api.client() as client:
        pictures = [Image.open(io.BytesIO(frame)) for frame in frames()]
        expected = expected_text(folder, Clip(pictures, TIMES), pictures[0])
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


# -- files ------------------------------------------------------------------------------------------------------------

REORDERED = Path(__file__).parent / "reordered.mp4"  # H.264 with B-frames, made with x264: frame i has the grey 20 * i
REORDERED_TIMES = [0, 0.02, 0.2, 0.3, 0.34, 1, 1.5, 1.53, 2, 2.5, 2.9, 3]


def shown_when(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """The frames that a player shows at these moments, each once. times: by the file, in milliseconds."""
    return sorted({max(i for i, at in enumerate(times) if at <= moment + 1e-3) for moment in moments})


def moments_of(video: VideoFile[None], last: float) -> list[float]:
    if video.fps is not None:
        return [place / video.fps for place in range(math.floor((last + 1e-3) * video.fps) + 1)]
    count = video.num_frames or min(16, max(1, math.ceil(last)))
    return [last / 2] if count == 1 else np.linspace(0, last, count).tolist()


OPTIONS: list[VideoFile[None]] = [
    *(VideoFile(None, fps=fps) for fps in (0.3, 1, 2.0, 5, 24, 999)),
    *(VideoFile(None, num_frames=count) for count in (1, 2, 7, 64)),
    VideoFile(None),
]


def test_frames_are_those_that_a_player_shows() -> None:
    rng = random.Random(0)
    for _ in range(8):
        steps = [rng.choice((0.02, 0.033, 0.04, 0.2, 1.7)) for _ in range(rng.randint(0, 80))]
        times = [round(at, 3) for at in itertools.accumulate(steps, initial=0.0)]
        for video in OPTIONS:
            chosen = [times[place] for place in shown_when(times, moments_of(video, times[-1]))]
            assert video.choose(times) == chosen, (video, times)


video_url = functools.partial(data_url, kind="video/mp4")


def ask(api: Api, path: Path, **options: Any) -> tuple[int, Any]:
    part = {"type": "video_url", "video_url": {"url": video_url(path.read_bytes()), **options}}
    return api.chat([part, {"type": "text", "text": QUESTION}], **SAMPLING)


def decoded(path: Path) -> list[Image.Image]:
    """All frames of a file."""
    capture = cv2.VideoCapture(str(path))
    found = []
    while (read := capture.read())[0]:
        found.append(Image.fromarray(read[1][..., ::-1]))
    return found


@pytest.mark.parametrize("name", ["reordered.mp4", "night.gif"])
def test_a_file_is_answered_as_the_frames_that_are_shown(api: Api, folder: Path, tmp_path: Path, name: str) -> None:
    """Of an uneven rate, over all interfaces. The processor's videos and the engine's answers are compared with those
    of transformers in tests/models and tests/hub."""
    path, times = (REORDERED, REORDERED_TIMES) if name == REORDERED.name else (tmp_path / name, NIGHT)
    if path != REORDERED:
        write_times(path, times)
    pictures = decoded(path)
    assert len(pictures) == len(times)
    for options in ({"num_frames": 4}, {"fps": 1.0}):
        chosen = shown_when(times, moments_of(VideoFile(None, **options), times[-1]))
        clip = Clip([pictures[place] for place in chosen], [times[place] for place in chosen])
        status, answer = ask(api, path, **options)
        assert status == 200 and answer["choices"][0]["message"]["content"] == expected_text(folder, clip)
    part = {"type": "input_video", "video_url": {"url": video_url(path.read_bytes()), "fps": 1}}
    body = {"model": "base", "input": [{"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}]}
    response = api.call("POST", "/v1/responses", {**body, "max_output_tokens": 6, "temperature": 0})[1]
    with api.client() as client:
        assert client.generate(QUESTION, [VideoFile(path, fps=1)], **SAMPLING).text == expected_text(folder, clip)
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_uploaded_videos_belong_to_their_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model that takes no videos, which gets the frames as pictures (of one token each)."""
    tokens = tuple(Token(name=name, secret=f"{name}-secret-12345") for name in ("one", "two"))
    with running_api(file_folder=str(tmp_path), tokens=tokens) as api:
        added: list[Request] = []
        add: Any = api.engine.engine.add
        headers = [{"Authorization": f"Bearer {token.secret}"} for token in tokens]
        sent = {"files": {"file": ("a.mp4", REORDERED.read_bytes())}, "data": {"purpose": "user_data"}}
        name = httpx.post(f"{api.url}/v1/files", headers=headers[0], timeout=60, **sent).json()["id"]  # type: ignore[arg-type]
        part = {"type": "video_url", "video_url": {"file_id": name, "num_frames": 3}}
        content = [{"type": "text", "text": "a"}, part, {"type": "image_url", "image_url": {"url": data_url(png(7))}}]
        body = {"model": "base", "messages": [{"role": "user", "content": content}], "max_tokens": 2}

        def keep(request: Request) -> None:
            added.append(request)
            add(request)

        monkeypatch.setattr(api.engine.engine, "add", keep)
        status, answer = api.call("POST", "/v1/chat/completions", body, headers=headers[0])
        assert status == 200 and answer["usage"]["prompt_tokens"] == len("a") + 3 + 1
        assert [item.fields["pixel_values"].data[0] for item in added[0].vision] == pytest.approx(
            [0, 119, 220, 7], abs=2
        )
        for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
            assert api.call("POST", path, body | {"max_tokens": None}, headers=headers[1])[0] == 404, path
    with running_api() as api:
        assert "keeps no files" in api.chat([part])[1]["error"]["message"]


def audio(path: Path) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        file.writeframes(bytes(8000))
    return path


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fps": 0}, "fps of a video is 0"),
    ({"fps": -1}, "fps of a video is -1"),
    ({"fps": math.nan}, "fps of a video is nan"),
    ({"fps": math.inf}, "fps of a video is inf"),
    ({"fps": 1e300}, "at most 1000"),
    ({"fps": 1, "num_frames": 3}, "fps and num_frames; send one"),
    ({"num_frames": 0}, "num_frames of a video is 0; it must be from 1 to 256"),
    ({"num_frames": 257}, "num_frames of a video is 257"),
    ({"file_id": "file-1"}, "url or file_id; send one"),
    ({"url": None}, "url or file_id; send one"),
    ({"url": "ftp://host/x"}, "video 1: unsupported URL; send a data URL (data:video/mp4;base64,...)"),
    ({"frames": 3}, "frames"),
]


def test_bad_files_and_options_are_refused_by_name(tmp_path: Path) -> None:
    whole = REORDERED.read_bytes()
    (tmp_path / "playlist.mp4").write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{REORDERED}\n#EXT-X-ENDLIST\n"
    )
    for name, content in {
        "empty.mp4": b"",
        "cut.mp4": whole[:900],
        "broken.mp4": whole.replace(b"avc1", b"avc9"),
        "sound.mp4": whole.replace(b"vide", b"soun"),
        "picture.mp4": png(),
        "large.mp4": whole + bytes(200_000),
    }.items():
        (tmp_path / name).write_bytes(content)
    day = write_times(tmp_path / "day.mkv", [0.0, 1.0, 36_000.0])
    no_video = "video 1: it is not a video that this machine can decode"
    cases = [
        *((tmp_path / f"{name}.mp4", 400, no_video) for name in ("empty", "cut", "picture", "playlist")),
        (tmp_path / "sound.mp4", 400, "video 1: it "),
        (audio(tmp_path / "a.wav"), 400, no_video),
        (tmp_path / "broken.mp4", 400, "video 1"),
        (tmp_path / "large.mp4", 413, "video 1 has over 200000 bytes"),
        (day, 413, "video 1: it lasts 36000.0 s; this server takes at most 600"),
    ]
    limits: dict[str, Any] = {"max_video_bytes": 200_000, "max_images": 8, "max_image_pixels": 2000}
    with running_api(**limits, max_request_pixels=5000) as api:
        for path, status, message in cases:
            got, answer = ask(api, path)
            assert got == status and message in answer["error"]["message"], (path, answer)
        options: dict[str, Any]
        for options, message in BAD_OPTIONS:
            got, answer = ask(api, REORDERED, **options)
            assert got == 400 and message in answer["error"]["message"], (options, answer)
        for options, message in (
            ({"fps": 100}, "12 of its frames are asked for, and this request has room for 8; send a lower fps"),
            ({"num_frames": 5}, "it has 5 frames of 32x32, and this request has room for 5000 pixels; ask for fewer"),
        ):
            got, answer = ask(api, REORDERED, **options)
            assert got == 413 and message in answer["error"]["message"], answer
        part = {"type": "video_url", "video_url": {"url": video_url(whole), "num_frames": 3}}
        got, answer = api.chat([part, part])
        assert got == 413 and "video 2: it has 3 frames of 32x32, and" in answer["error"]["message"]
        with api.client() as client, pytest.raises(BadRequest, match="fps of a video is 0"):
            client.generate("a", [VideoFile(REORDERED, fps=0)])
        assert ask(api, REORDERED, num_frames=2)[0] == 200


def test_a_decoder_that_crashes_or_hangs_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    python = image_sources.DECODER[0]
    with running_api(request_timeout_s=2.0) as api:
        for code, status, message in (
            ("import os; os.kill(os.getpid(), 11)", 400, "its decoder crashed; the file may be broken"),
            ("import time; time.sleep(1000)", 504, ""),
        ):
            monkeypatch.setattr(image_sources, "DECODER", (python, "-c", code))
            part = {"type": "video_url", "video_url": {"url": video_url(b"a")}}
            got, answer = api.chat([part])
            assert got == status and message in answer["error"]["message"]
        until(lambda: not [each for each in psutil.Process().children() if "sleep(1000)" in " ".join(each.cmdline())])
        assert api.chat("a")[0] == 200
