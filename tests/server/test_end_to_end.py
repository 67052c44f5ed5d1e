"""`vlora serve` with a real model in its own process: its answers equal those of `LocalEngine`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoConfig

import atmm
from fusion.folder import replace_results
from heads import HeadSpec, TaskHead, save_heads
from tests.families import build_model
from tests.processors import write_checkpoint
from tests.server.running import noise
from tests.server.served import Served, call, served
from tools.embedded_model.model import build_model as build_embedded
from tools.embedded_model.processor import build_processor
from vlora.cli.train import replacing_served
from vlora.client import Client, TextQuestion
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadAdapter
from vlora.models.processing import InputProcessor
from vlora.types import Request, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow  # test_serve.py and test_openai_client.py are fast

EMBEDDED = "embedded"  # the small LLaVA that ships with the package
SERVED = (
    EMBEDDED,
    *(pytest.param(family, marks=pytest.mark.exhaustive) for family in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")),
)
QUESTION = "what digit is shown ?"
ADAPTERS = {"small": (4, 1), "large": (16, 2)}  # name -> rank, frames of its head


def write_model(folder: Path, family: str = EMBEDDED) -> None:
    """A model of a family with random weights, and two random adapters with heads."""
    if family == EMBEDDED:
        build_embedded(0).save_pretrained(folder / "model")
        build_processor().save_pretrained(folder / "model")
    else:
        write_checkpoint(folder / "model", family, "digit")
    hidden_size = AutoConfig.from_pretrained(folder / "model").text_config.hidden_size
    generator = torch.Generator().manual_seed(0)
    for name, (rank, frames) in ADAPTERS.items():
        linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears, init_lora_weights=False)
        model = build_embedded(0) if family == EMBEDDED else build_model(family)
        get_peft_model(model, config).save_pretrained(str(folder / "adapters" / name))
        form: dict[str, Any] = {"name": "letter", "task": "classification", "labels": ("a", "b", "c")}
        spec = HeadSpec(prompt=QUESTION, num_frames=frames, hidden_size=hidden_size, **form)
        head = TaskHead(spec, torch.randn(3, hidden_size, generator=generator), torch.zeros(3))
        save_heads(folder / "adapters" / name, {"letter": head})


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Served]:
    shutil.copytree(folder / "adapters" / "small", folder / "shelf" / "found")
    own = "--adapters", str(folder / "adapters"), "--adapter-source", str(folder / "shelf")
    with served("--model", str(folder / "model"), *own, "--dtype", "float32") as on:
        assert on.ready.endswith(" adapters: large, small\n")
        assert on.process.stdout is not None and on.process.stdout.readline().startswith("ATMM table: ")
        assert on.client.stats().cpu_kernels == ("compiled" if atmm.load_kernels() else "plain torch")
        yield on
    assert on.log == ""


@pytest.fixture
def client(serving: Served) -> Client:
    return serving.client


class Local:
    """The same model and adapters in this process."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(model=str(folder / "model"), dtype="float32")
        self.processor = InputProcessor.from_pretrained(config.model)
        self._engine = LocalEngine(config)
        for name in ADAPTERS:
            self._engine.engine.load_adapter(name, str(folder / "adapters" / name))

    def ask(self, images: list[bytes], **fields: Any) -> list[RequestOutput]:
        pictures = [Image.open(io.BytesIO(image)) for image in images]
        prompt = self.processor.encode(self.processor.chat(QUESTION, len(images)), pictures)
        request = Request(request_id="r", prompt_ids=prompt.prompt_ids, vision=prompt.vision, **fields)
        return self._engine.run([request])["r"]

    def text(self, images: list[bytes], adapter: str | None, sampling: SamplingParams) -> str:
        outputs = self.ask(images, adapter=adapter, sampling=sampling)
        return self.processor.decode([token for output in outputs for token in output.token_ids])


@pytest.fixture(scope="module")
def local(folder: Path) -> Local:
    return Local(folder)


def picture(seed: int) -> bytes:
    return noise(seed, (80, 120))


SAMPLING: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


def test_served_answers_equal_those_of_the_local_engine(client: Client, local: Local) -> None:
    requests = [(adapter, [picture(i) for i in range(images)]) for adapter in (None, *ADAPTERS) for images in (0, 1, 2)]
    with ThreadPoolExecutor(9) as threads:
        answers = list(threads.map(lambda ask: client.generate(QUESTION, ask[1], ask[0], **SAMPLING), requests))
    for (adapter, images), answer in zip(requests, answers, strict=True):
        assert answer.text == local.text(images, adapter, SamplingParams(**SAMPLING))
        assert answer.num_completion_tokens == 8 and answer.finish_reason == "length"
    assert len({answer.text for answer in answers}) > 3  # answers depend on adapters and images
    named: dict[str, Any] = {"large+small": "small+large", "large+-3*small": {"small": -3, "large": 1.0}}
    composed = {name: client.generate(QUESTION, [picture(0)], given, **SAMPLING) for name, given in named.items()}
    for name, answer in composed.items():
        assert answer.adapter == name and answer.text == local.text([picture(0)], name, SamplingParams(**SAMPLING))
    alone = {name: client.generate(QUESTION, [picture(0)], name, **SAMPLING).text for name in ADAPTERS}
    assert len({*alone.values(), *(answer.text for answer in composed.values())}) == 4
    assert [status.name for status in client.adapters()] == ["large", "small"]


def test_adapters_of_a_source_and_uploads_answer_as_their_folder(client: Client, local: Local, folder: Path) -> None:
    sent = folder / "adapters" / "small"
    expected = local.text([picture(3)], "small", SamplingParams(max_tokens=8))
    assert client.load_adapter("sent", sent, upload=True).version
    for name in ("sent", "found"):
        answer = client.generate(QUESTION, [picture(3)], adapter=name, max_tokens=8, answer="words")
        assert answer.text == expected
    versions = {status.version for status in client.adapters() if status.name in ("sent", "found")}
    assert len(versions) == 1
    for name in ("sent", "found"):
        client.unload_adapter(name)
    for extra, message in (("model.safetensors", "weights that PEFT does not load"), ("adapter_model.safetensors", "")):
        broken = shutil.copytree(sent, folder / "broken", dirs_exist_ok=True)
        (broken / extra).write_bytes(b"{}")
        with pytest.raises(BadAdapter, match=message or "cannot be read as safetensors"):
            client.load_adapter("broken", broken, upload=True)
        (broken / extra).unlink()


def test_served_head_results_equal_those_of_the_local_engine(client: Client, local: Local) -> None:
    for name, (_, frames) in ADAPTERS.items():
        images = [picture(i) for i in range(frames)]
        expected = local.ask(images, adapter=name, head="letter")[-1].head
        assert expected is not None
        result = client.ask_head(images, name, "letter")
        assert (result.label, result.label_id) == (expected.label, expected.label_id)
        assert result.scores == pytest.approx(expected.scores, abs=1e-4)
        before = client.stats().num_vision_encoded
        outcomes = client.ask_heads([picture(i) for i in range(7, 7 + frames)], [(name, "letter")] * 3)
        alone = client.ask_head([picture(i) for i in range(7, 7 + frames)], name, "letter")
        for outcome in outcomes:
            assert outcome.answer is not None and outcome.answer.scores == pytest.approx(alone.scores, abs=1e-4)
        assert client.stats().num_vision_encoded - before <= frames, "pictures are encoded once for all heads"


def test_a_stream_of_frames_equals_single_questions(client: Client) -> None:
    before = client.stats().num_vision_encoded
    asked = [TextQuestion(QUESTION, "small", 4), TextQuestion(QUESTION, "large", 4)]
    with client.open_stream(adapter="small", head="letter", questions=asked, drop="none") as frames:
        assert [frames.send(picture(number)) for number in range(20, 24)] == [0, 1, 2, 3]
        frames.end()
        results = list(frames)
    assert client.stats().num_vision_encoded - before <= 4, "each picture is encoded once"
    for number, result in enumerate(results, 20):
        alone = client.ask_head([picture(number)], "small", "letter")
        assert result.answer is not None and result.answer.scores == pytest.approx(alone.scores, abs=1e-4)
        texts = [client.generate(QUESTION, [picture(number)], each.adapter, max_tokens=4).text for each in asked]
        assert [each.label for each in result.answers[1:]] == texts


def chat(port: int, **fields: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    return call(port, "POST", "/v1/chat/completions", body)


def test_a_run_replaces_its_adapters_while_requests_are_answered(folder: Path, local: Local, tmp_path: Path) -> None:
    """Every answer is that of the former or of the new content, also of an adapter that was never read before."""
    images = [picture(0)]
    texts = {name: local.text(images, name, SamplingParams(max_tokens=6)) for name in ADAPTERS}
    assert texts["small"] != texts["large"]
    before = {"same": "large", "changed": "small", "busy": "small", "unread": "small", "lost": "small"}
    after = {"same": "large", "changed": "large", "unread": "large", "more": "small"}

    def write(run: Path, adapters: dict[str, str]) -> None:
        for name, content in adapters.items():
            shutil.copytree(folder / "adapters" / content, run / "adapters" / name)
        (run / "test").mkdir()
        (run / "report.html").touch()
        (run / "report.json").write_text(json.dumps({"adapters": [{"name": name} for name in adapters], "domains": []}))

    write(tmp_path, before)
    answers: list[tuple[str, str]] = []
    done = threading.Event()
    with served("--model", str(folder / "model"), "--adapters", str(tmp_path / "adapters"), "--dtype", "float32") as on:

        def ask(name: str) -> str:
            return on.client.generate(QUESTION, images, adapter=name, answer="words", max_tokens=6).text

        def keep_asking(name: str) -> None:
            while not done.is_set():
                answers.append((name, ask(name)))
                time.sleep(0.1)

        sampling: dict[str, Any] = {"answer": "words", "max_tokens": 100, "ignore_eos": True}
        whole = on.client.generate(QUESTION, images, adapter="busy", **sampling).text
        with ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as at_end:
            at_end.callback(done.set)  # also if an assertion fails
            asking = [threads.submit(keep_asking, name) for name in ("changed", "same")]
            busy = on.client.stream(QUESTION, images, adapter="busy", **sampling)
            begun = next(busy)
            with replacing_served(on.client, tmp_path / "adapters"):
                with replace_results(tmp_path) as staged:
                    write(staged, after)
                assert ask("lost") == ask("unread") == texts["small"]
            assert begun + "".join(busy) == whole
            assert {name: ask(name) for name in after} == {name: texts[content] for name, content in after.items()}
            done.set()
            for each in asking:
                each.result()
        assert {each.name for each in on.client.adapters()} == after.keys()
        assert set(answers) == {("changed", texts["small"]), ("changed", texts["large"]), ("same", texts["large"])}
        assert on.client.stats().num_failed == 0
