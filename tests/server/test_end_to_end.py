"""`vlora serve` with a real model in its own process, over both wires: the answers equal those of `LocalEngine`, and
they go on after kill -9 of the engine, as trainings and clients of its base model do.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoConfig

import atmm
from fusion.folder import replace_results
from heads import HeadSpec, TaskHead, save_heads
from tests.engine.served_base import config as base_config
from tests.engine.served_base import plain_model
from tests.engine.served_base import write_checkpoint as write_base
from tests.families import build_model
from tests.processes import PATIENCE_S, until
from tests.processors import write_checkpoint
from tests.server.served import Caller, Served, call, children, last_code, served, until_alive
from tests.split.test_equality import WITHIN, apart, losses
from tests.training.beside import Case, adapter_of, losses_of, settle
from tools.embedded_model.model import build_model as build_embedded
from tools.embedded_model.processor import build_processor
from vlora.cli.adapters import replacing_served
from vlora.client import Client
from vlora.client.values import FrameResult
from vlora.config import EngineConfig, ServedBase, Token
from vlora.engine import LocalEngine
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.errors import BadAdapter, BadImage, EngineDead, PromptTooLong, Unauthorized, UnknownAdapter, UnknownHead
from vlora.models import InputProcessor
from vlora.split import connect
from vlora.types import Request, RequestOutput, SamplingParams, TrainingStatus

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
    with served("--model", str(folder / "model"), "--adapters", str(folder / "adapters"), "--dtype", "float32") as on:
        assert on.ready.endswith(" adapters: large, small\n")
        assert on.process.stdout is not None and on.process.stdout.readline().startswith("ATMM table: ")
        assert on.client.stats().cpu_kernels == ("compiled" if atmm.load_kernels() else "plain torch")
        yield on
    deaths = on.log.count("killed by SIGKILL")
    assert on.log.count(" warning ") == on.log.count("\n") == 2 * deaths, on.log


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
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (80, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


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
    with client.open_stream(adapter="small", head="letter", drop="none") as frames:
        assert [frames.send(picture(number)) for number in range(4)] == [0, 1, 2, 3]
        frames.end()
        answers = [result.answer for result in frames]
    for number, answer in enumerate(answers):
        alone = client.ask_head([picture(number)], "small", "letter")
        assert answer is not None and answer.scores == pytest.approx(alone.scores, abs=1e-4)


def test_streams_join_to_the_answer_and_stop_strings_cut_it(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    stream = client.stream(QUESTION, [picture(1)], "small", **options)
    pieces = list(stream)
    assert stream.answer is not None and "".join(pieces) == stream.answer.text
    word = stream.answer.text.split()[5]
    cut = client.generate(QUESTION, [picture(1)], "small", stop=word, **options)
    assert cut.finish_reason == "stop" and cut.text == stream.answer.text.partition(word)[0]


def test_errors_are_typed_and_the_engine_continues(client: Client, folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    for file in (folder / "adapters" / "small").iterdir():
        size = 1000 if file.suffix == ".safetensors" else None
        (broken / file.name).write_bytes(file.read_bytes()[:size])
    for ask, error, message in (
        (lambda: client.generate("word " * 2000), PromptTooLong, r"has \d{4} tokens and up to 128 .* context of 1024"),
        (lambda: client.generate(QUESTION, [picture(0)[:500]]), BadImage, "image 1"),
        (lambda: client.generate(QUESTION, adapter="absent"), UnknownAdapter, "registered: large, small"),
        (lambda: client.ask_head([picture(0)], "small", "digit"), UnknownHead, "its heads: letter"),
        (lambda: client.load_adapter("broken", broken), BadAdapter, "cannot be read as safetensors"),
        (lambda: client.load_adapter("a", "a\x00b"), BadAdapter, "null byte"),
    ):
        with pytest.raises(error, match=message):
            ask()
    assert client.generate("what is <image> ?", [picture(0)], max_tokens=1, ignore_eos=True).num_completion_tokens == 1
    stats = client.stats()
    assert stats.num_running == stats.num_waiting == 0


def chat(port: int, **fields: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    return call(port, "POST", "/v1/chat/completions", body)


def code_of(frame: FrameResult) -> str | None:
    return frame.error.code if frame.error else None


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

        sampling: dict[str, Any] = {"answer": "words", "max_tokens": 300, "ignore_eos": True}
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


@pytest.mark.exhaustive  # test_serve.py kills a scripted engine
def test_adapters_and_streams_survive_a_kill_of_the_engine(serving: Served, folder: Path) -> None:
    client, port = serving.client, serving.http_port
    extra = shutil.copytree(folder / "adapters" / "small", folder / "extra")
    (engine,) = children(serving.process.pid)
    frames = client.open_stream(adapter="small", head="letter", drop="none")
    status, _ = call(port, "POST", "/v1/adapters", {"name": "more", "path": str(extra)})
    assert status == 201 and call(port, "PUT", "/v1/adapters/more/pin")[0] == 200
    status, before = chat(port, model="more", max_tokens=5)
    assert status == 200 and frames.send(picture(0)) == 0
    answered = next(frames).answer
    assert answered is not None
    # A random model may draw the end token at any place, and which place depends on the processor's rounding.
    long = {"model": "more", "max_tokens": 900, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    callers = [
        Caller(lambda: last_code(chat(port, **long, stream=True))),
        Caller(lambda: last_code(chat(port, **long))),
        Caller(lambda: last_code(chat(port, **long, n=3))),
        Caller(lambda: client.generate(QUESTION, max_tokens=900, ignore_eos=True)),
        Caller(lambda: list(client.stream(QUESTION, max_tokens=900, ignore_eos=True))),
    ]
    until(lambda: client.stats().num_running >= 7)
    os.kill(engine, signal.SIGSTOP)  # so that the frames wait on any machine
    assert [frames.send(picture(number)) for number in (1, 2, 3)] == [1, 2, 3]
    callers.append(Caller(lambda: code_of(next(frames))))
    os.kill(engine, signal.SIGKILL)
    for caller in callers:
        caller.join(PATIENCE_S)
    assert [caller.result for caller in callers] == ["engine_dead"] * 6
    assert call(port, "GET", "/ready")[0] == 503 and "vlora_engine_up 0.0" in call(port, "GET", "/metrics")[1]
    assert frames.send(picture(0)) == 4  # accepted without an engine: waits for the replacement
    assert until_alive(client).num_restarts == 1
    pins = {"large": False, "more": True, "small": False}
    assert {each.name: each.pinned for each in client.adapters()} == pins
    after = chat(port, model="more", max_tokens=5)
    assert [json.loads(text)["choices"] for text in (before, after[1])] == [json.loads(before)["choices"]] * 2
    assert [code_of(next(frames)), code_of(next(frames))] == ["engine_dead"] * 2
    resumed = next(frames)
    assert resumed.number == 4 and resumed.answer is not None
    assert resumed.answer.scores == pytest.approx(answered.scores, rel=1e-3)
    frames.close()


NUM_STEPS = 60
SHOWN = "what is shown in the picture ?"
LONG_S = 300.0  # only ends a test that hangs


def stopped(process: subprocess.Popen[str], folder: Path) -> psutil.Process:
    """The engine, stopped between its first checkpoint and the end of the training."""
    (engine,) = psutil.Process(process.pid).children()
    while not (folder / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(1e-3)
    engine.suspend()
    assert not (folder / "training.json").exists(), "the training has ended already"
    return engine


def wait_training(
    client: Client, process: subprocess.Popen[str], until: Callable[[TrainingStatus], bool]
) -> TrainingStatus:
    """Poll the only training while an engine is ready, as long as the server runs."""
    found: tuple[TrainingStatus, ...] = ()
    end_s = time.monotonic() + LONG_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(EngineDead):
            found = client.trainings()
            if found and until(found[0]):
                return found[0]
        time.sleep(0.01)
    raise AssertionError(f"still {found}")


@pytest.mark.exhaustive  # the supervisor submits trainings again (test_engine_process.py), and they resume
def test_a_training_survives_kill_9_of_its_engine(tmp_path: Path) -> None:
    """The engine is stopped when it has a checkpoint, so that nothing changes until it is killed."""
    case = Case.make(tmp_path)
    whole = case.engine(case.plan("whole", ["first"], steps=NUM_STEPS))
    settle(whole.parts.trainings, whole)
    expected = losses_of(tmp_path / "whole" / "first")
    plan, folder = case.plan("served", ["first"], steps=NUM_STEPS), tmp_path / "served" / "first"
    options = ["--model", case.model, "--dtype", "float32", "--switching", "shadow", "--arena-bytes", str(64 << 20)]
    with served(*options, "--train-slowdown", "inf") as on:
        client, process = on.client, on.process
        answer = client.generate(SHOWN, max_tokens=8).text
        client.train(str(plan))
        engine = stopped(process, folder)
        saved = torch.load(folder / "checkpoint.pt")["progress"]
        engine.kill()
        engine.wait(LONG_S)
        after = wait_training(client, process, lambda one: True)
        assert after.num_tokens >= saved["num_tokens"] > 0 and after.step >= saved["step"], "progress was lost"
        assert client.generate(SHOWN, max_tokens=8).text == answer
        last = wait_training(client, process, lambda one: one.state == "finished")
        assert client.generate(SHOWN, max_tokens=8).text == answer
        assert client.generate(SHOWN, adapter="first", max_tokens=8).adapter == "first"
    assert losses_of(folder) == expected and len(expected) == NUM_STEPS
    assert last.loss == expected[-1] and math.isfinite(expected[-1])
    found, wanted = (adapter_of(tmp_path / one / "first") for one in ("served", "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert json.loads((folder / "training.json").read_text())["state"] == "finished"


OLD, NEW = (Token(name=name, secret=name * 16) for name in "on")


def supervised(config: EngineConfig, test: Any) -> list[str]:
    """Run a function in a thread beside an engine. Returns the log."""
    logged: list[str] = []

    async def main() -> None:
        engine = await SupervisedEngine.start(config, log=logged.append)
        loop = asyncio.get_running_loop()

        def stats() -> Any:
            return asyncio.run_coroutine_threadsafe(engine.stats(), loop).result(30)

        try:
            await asyncio.to_thread(test, engine, loop, stats)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 120))
    return logged


@pytest.mark.exhaustive
def test_a_client_goes_on_after_kill_9_of_the_engine(tmp_path: Path) -> None:
    """And tokens that were replaced before are those of the next engine."""
    folder = write_base(tmp_path / "model", "qwen2_vl")
    model, address = plain_model(folder), f"unix:{tmp_path}/base.sock"
    plain = losses("lora", "qwen2_vl", copy.deepcopy(model))
    base = ServedBase(addresses=(address,), tokens=(OLD,))
    found: list[float] = []

    def train() -> None:
        with connect(address, token=OLD.secret) as opened:
            found.extend(losses("lora", "qwen2_vl", opened.wrap(copy.deepcopy(model))))
            assert opened.num_repeated

    def test(engine: SupervisedEngine, loop: asyncio.AbstractEventLoop, stats: Any) -> None:
        client = threading.Thread(target=train)
        client.start()
        until(lambda: stats().num_base_calls > 20)
        with pytest.raises(Unauthorized):
            connect(address, token=NEW.secret)
        loop.call_soon_threadsafe(engine.replace_base_tokens, (OLD, NEW))
        until(lambda: _admits(address, NEW))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        client.join()
        assert _admits(address, NEW)

    logged = supervised(dataclasses.replace(base_config(folder), serve_base=base), test)
    assert apart(found, plain) < WITHIN and logged[-1] == "the engine is ready again"
    assert not (tmp_path / "base.sock").exists()


def _admits(address: str, token: Token) -> bool:
    try:
        connect(address, token=token.secret).close()
    except Unauthorized:
        return False
    return True
