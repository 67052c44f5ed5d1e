"""`vlora serve --tensor-parallel 2` over HTTP: the answers of one rank for every sharding, and the error of all
requests when a rank is killed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.parallel.test_death import is_left, ranks_of
from tests.processes import PATIENCE_S, until
from tests.server.served import Caller, call, children, last_code, until_alive
from tests.server.test_end_to_end import QUESTION, Local, chat, picture
from tests.server.test_end_to_end import folder as folder  # a fixture
from vlora.client import Client
from vlora.types import SamplingParams

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8

pytestmark = pytest.mark.slow  # test_same_answers.py is the fast test of answers on several ranks


class Serving(NamedTuple):
    process: subprocess.Popen[str]
    client: Client
    http_port: int
    log: Path


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    arguments = ["--model", str(folder / "model"), "--adapters", str(folder / "adapters"), "--dtype", "float32"]
    arguments += ["--tensor-parallel", "2", "--sharding", "small=slora", "--threads", "1", "--rpyc-port", "0"]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlora.cli", "serve", *arguments, "--http-port", "0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "VLORA_LOG_LEVEL": "info"},
        )
    try:
        assert process.stdout is not None
        match = re.match(
            r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) .* adapters: large, small\n", process.stdout.readline()
        )
        assert match, log.read_text()
        with Client(port=int(match[1]), timeout_s=60) as client:
            yield Serving(process, client, int(match[2]), log)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def question_about(image: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": NUM_TOKENS, "answer": "words"}


def test_answers_streams_and_heads_equal_those_of_one_rank(serving: Serving, folder: Path) -> None:
    local = Local(folder)
    image = picture(1)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    base = json.loads(call(serving.http_port, "GET", "/v1/models")[1])["data"][0]["id"]
    texts, path = set(), "/v1/chat/completions"
    for model, adapter in ((base, None), ("small", "small"), ("large", "large")):
        wanted = local.text([image], adapter, sampling)
        status, answer = call(serving.http_port, "POST", path, {"model": model, **question_about(image)})
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == wanted
        body = {"model": model, **question_about(image), "stream": True}
        status, events = call(serving.http_port, "POST", path, body)
        chunks = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n")[:-2]]
        assert status == 200
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == wanted
        texts.add(wanted)
    assert len(texts) == 3, "the adapters make no difference"
    images = {"small": [image], "large": [image, picture(2)]}
    for name, shown in images.items():
        expected = local.ask(shown, adapter=name, head="letter")[-1].head
        assert expected is not None
        body = {"images": [data_url(each) for each in shown]}
        status, answer = call(serving.http_port, "POST", f"/v1/heads/{name}/letter", body)
        assert status == 200
        assert list(json.loads(answer)["scores"].values()) == pytest.approx(expected.scores, abs=1e-4)
    adapters = json.loads(call(serving.http_port, "GET", "/v1/adapters")[1])["data"]
    assert {each["name"]: each["sharding"] for each in adapters} == {"large": "replicated", "small": "slora"}


def test_a_killed_rank_fails_all_requests_and_is_restarted(serving: Serving) -> None:
    (engine,) = children(serving.process.pid)
    before = chat(serving.http_port, model="small", max_tokens=5)[1]
    long = {"max_tokens": 900, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    callers = [
        Caller(lambda: last_code(chat(serving.http_port, model="small", **long, stream=True))),
        Caller(lambda: last_code(chat(serving.http_port, model="large", **long))),
        Caller(lambda: serving.client.generate(QUESTION, max_tokens=900, ignore_eos=True)),
        Caller(lambda: list(serving.client.stream(QUESTION, max_tokens=900, ignore_eos=True))),
    ]
    until(lambda: serving.client.stats().num_running == len(callers))
    pids = ranks_of(engine)
    os.kill(pids[1], signal.SIGKILL)
    for caller in callers:
        caller.join(PATIENCE_S)
    assert [caller.result for caller in callers] == ["engine_dead"] * len(callers)
    until_alive(serving.client)
    after = chat(serving.http_port, model="small", max_tokens=5)[1]
    assert json.loads(after)["choices"] == json.loads(before)["choices"]
    assert "rank 1 was killed by SIGKILL; it is being restarted" in serving.log.read_text()
    assert not any(is_left(pid) for pid in pids)
