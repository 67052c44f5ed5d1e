"""Every script in examples/ does what its docstring says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy
import openai
import pytest
from PIL import Image

from apps.video_analytics.plan.plan_file import check_server, read_plan
from apps.video_analytics.plan.run_plan import summarize
from examples import (
    ask_over_http,
    minimal_engine,
    own_pictures,
    stream_camera,
    train_adapter_with_peft,
    two_adapters_one_image,
)
from fusion.embedded import checkpoint_path
from tests.apps.scripted import adapter_status
from tests.cluster.user_ray import UserRay
from tests.fusion.made import load_plan
from tests.processes import free_port, until
from tests.server.api import running_api
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import AsyncClient, Client
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadPlan
from vlora.models.processing import InputProcessor
from vlora.types import Request, SamplingParams


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 1}, "signs": {"night": 1}}) as running:
        yield running


@pytest.mark.slow
def test_minimal_engine_answers_with_the_adapter_and_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    answers = minimal_engine.run()
    assert answers["base"] == "red"
    assert answers["adapted"] == answers["adapted again"] != answers["base"]
    steps = re.findall(r"^step \d+: (\w+), (\d) requests, \d+ tokens$", capsys.readouterr().out, re.MULTILINE)
    assert {mode for mode, _ in steps} <= {"merged", "unmerged", "mixed"} and sum(int(num) for _, num in steps) >= 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_adapter_trained_with_plain_peft_is_served(tmp_path: Path) -> None:
    losses = train_adapter_with_peft.train(tmp_path)
    assert losses[-1] < 0.1 < losses[0]
    engine = LocalEngine(EngineConfig(model=checkpoint_path(), arena_bytes=64 * 2**20))
    engine.engine.register_adapters({"opposite": str(tmp_path)})
    processor = InputProcessor.from_pretrained(checkpoint_path())
    prompt = processor.chat(train_adapter_with_peft.QUESTION, 1)
    requests = []
    for color in train_adapter_with_peft.ANSWERS:
        encoded = processor.encode(prompt, [Image.new("RGB", (56, 56), color)])
        sampling = SamplingParams(max_tokens=1)
        requests.append(
            Request(
                request_id=color,
                adapter="opposite",
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                sampling=sampling,
            )
        )
    outputs = engine.run(requests)
    engine.engine.close()
    answers = {color: processor.decode([t for o in found for t in o.token_ids]) for color, found in outputs.items()}
    assert answers == train_adapter_with_peft.ANSWERS


def test_a_video_is_answered_frame_by_frame(server: Running, tmp_path: Path) -> None:
    video = str(tmp_path / "clip.avi")
    writer = cv2.VideoWriter(video, cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 32))
    for level in (10, 250, 10):
        writer.write(numpy.full((32, 32, 3), level, numpy.uint8))
    writer.release()
    with (
        Client(port=server.port) as client,
        client.open_stream(adapter="cam", head="night", drop="none") as stream,
    ):
        lines = list(stream_camera.watch(stream, video))
    assert [line.split()[:2] for line in lines] == [["0", "dark"], ["1", "bright"], ["2", "dark"]]


def test_several_adapters_answer_about_one_picture(server: Running, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(png(10))

    async def ask() -> dict[str, str]:
        async with AsyncClient(port=server.port) as client:
            return await two_adapters_one_image.ask(client, str(picture), "say:hello", ["cam", "signs"])

    assert asyncio.run(ask()) == {"cam": "hello", "signs": "hello"}


def test_openai_s_client_asks_base_model_and_adapter(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(png(10))
    with running_api() as api:
        api.on_loop(api.front_end.adapters.load("signs", write_adapter(tmp_path / "signs")))
        client: Any = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=30)
        with client:
            answers = ask_over_http.ask(client, picture, "say:hello", ["signs"])
    assert answers == {"base": "hello", "signs": "hello"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ray_serve_passes_requests_and_streams_on() -> None:
    """On a Ray that a user has started, with its token."""
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed", exc_type=ImportError)
    ray, port = UserRay(num_cpus=1), free_port()
    code = (
        "import sys\nfrom ray import serve\nfrom examples.ray_serve import app\n"
        f"serve.start(http_options={{'port': {port}}})\nserve.run(app)\nprint('serves', flush=True)\nsys.stdin.read()"
    )
    try:
        with running_api() as api:
            environ = os.environ | ray.environ | {"RAY_ADDRESS": ray.address, "VLORA_URL": api.url}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with subprocess.Popen([sys.executable, "-c", code], env=environ, **pipes) as deploying:
                assert "serves\n" in iter(deploying.stdout.readline, "")  # type: ignore[union-attr]
                url = f"http://127.0.0.1:{port}"
                given = {"messages": [{"role": "user", "content": "say:one two"}], "model": "base"}
                assert httpx.post(f"{url}/v1/chat/completions", json={**given, "model": "none"}).status_code == 404
                found = httpx.post(f"{url}/v1/chat/completions", json=given).json()
                assert found["choices"][0]["message"]["content"] == "one two"
                assert httpx.get(f"{url}/v1/models").json() == httpx.get(f"{api.url}/v1/models").json()
                client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
                endless = {"model": "base", "max_tokens": 90_000, "stream": True}
                stream = client.chat.completions.create(messages=[{"role": "user", "content": "forever"}], **endless)
                assert next(iter(stream)) and api.engine.engine.running
                stream.close()
                assert api.idle()
                deploying.stdin.close()  # type: ignore[union-attr]
    finally:
        ray.close()


def test_a_domain_of_own_pictures_is_asked_in_every_way(tmp_path: Path) -> None:
    own_pictures.draw_folders(tmp_path, 6)
    (tmp_path / "plan.yaml").write_text(own_pictures.plan(("lights", "shapes"), steps=5))
    splits = load_plan(tmp_path / "plan.yaml")
    assert {name: data.splits.labels for name, data in splits.items()} == {
        name: tuple(sorted(labels)) for name, labels in own_pictures.LABELS.items()
    }
    picture = tmp_path / "lights" / "red" / "0.png"
    with running_api() as api:
        api.on_loop(api.front_end.adapters.load("fused-1", write_adapter(tmp_path / "fused-1", {"lights": 1})))
        address = f"127.0.0.1:{api.port}"
        answers = own_pictures.ask_in_every_way(api.url, address, "lights", picture)
        assert answers == dict.fromkeys(("HTTP", "RPyC", "stream", "command line"), "dark")
        with own_pictures.asking(lambda: own_pictures.over_http(api.url, "lights", picture)) as meanwhile:
            until(lambda: len(meanwhile) > 2)
            api.on_loop(api.front_end.adapters.unload("fused-1"))
            until(lambda: "404" in meanwhile[-1])
    assert meanwhile[0] == "dark"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # two runs of `vlora fuse`
def test_a_domain_is_added_to_a_server_without_a_lost_request(tmp_path: Path) -> None:
    answers = own_pictures.run(tmp_path, steps=12, count=24)
    assert set(answers) == {"lights", "shapes"} and {len(set(found.values())) for found in answers.values()} == {1}
    assert set(answers["lights"].values()) == {"red"}


def test_the_plan_of_cameras_asks_what_its_server_has() -> None:
    file = read_plan(Path("examples/analytics.yaml"))
    summary = summarize(file.plan)
    assert (summary.heads_per_s, summary.max_tokens_per_s) == pytest.approx((7, 2.4))
    assert {task.head for camera in file.plan.cameras for task in camera.tasks if task.track} == {"traffic/cars"}
    cars, jam = ("cars", "detection", ("car", "person"), 1), ("jam", "classification", ("free", "jam"), 1)
    parking = adapter_status("parking", "", ("lots", "counting", ("free",), 1))
    statuses = [adapter_status("traffic", "", cars, jam), parking]
    check_server(file, statuses)
    with pytest.raises(BadPlan, match=r"analytics\.yaml, line 41, field `cameras\[1\].tasks\[0\].head`: no adapter"):
        check_server(file, statuses[:1])
