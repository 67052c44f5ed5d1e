"""The gateway bench: pairs of measurements, the first text of a stream, its server, which ends with the bench."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import connection
from pathlib import Path

import pytest

from benchmarks.gateway import BlockingHttpClient, RequestTimes, median_error, pair_row
from benchmarks.instrumented_engine import DirectRequest
from fusion.embedded import checkpoint_path
from vlora.bench.serve.server_process import launched_server
from vlora.client import Client
from vlora.models.processing import InputProcessor


def test_added_latency_is_measured_pair_by_pair() -> None:
    """A slowdown of the machine affects both measurements of a pair."""
    pairs = [
        (RequestTimes(0.1 * slow, 1.0 * slow), RequestTimes(0.1 * slow + 0.001, 1.0 * slow + added), 0.25)
        for slow, added in ((1, 0.002), (1, 0.004), (5, 0.003), (5, 0.009), (5, 0.003))
    ]
    row = pair_row("HTTP", 16, pairs)
    assert row["requests"] == 5 and row["engine ms"] == 5000 and row["front end's CPU ms"] == 250
    assert row["adds ms"] == pytest.approx(3) and row["adds p95 ms"] == pytest.approx(9)
    assert row["first adds ms"] == row["first adds p95 ms"] == pytest.approx(1)
    assert row["first adds error ms"] == pytest.approx(0) and row["adds error ms"] > 0.1  # each figure has its own
    assert row["engine adds ms"] is None
    whole = pair_row("HTTP", 16, [(alone, RequestTimes(None, seen.whole_s), cpu) for alone, seen, cpu in pairs])
    assert whole["first adds ms"] is None and whole["adds ms"] == row["adds ms"]
    with_engine = pair_row(
        "RPyC", 16, [(alone, seen._replace(engine_s=seen.whole_s - 0.0015), cpu) for alone, seen, cpu in pairs]
    )
    assert with_engine["engine adds ms"] == pytest.approx(1.5)


def test_the_error_of_a_median_is_the_scatter_of_medians() -> None:
    draws = random.Random(0)
    samples = [[draws.expovariate(1) for _ in range(101)] for _ in range(2000)]
    scatter = statistics.pstdev(statistics.median(sample) for sample in samples)
    assert statistics.fmean(map(median_error, samples)) == pytest.approx(scatter, rel=0.15)
    assert median_error([1.0]) == 0


@pytest.mark.slow
def test_first_text_and_end_of_a_stream() -> None:
    """Earlier events with roles and empty text do not count."""
    read = threading.Event()

    class Streaming(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, delta in enumerate(({"content": ""}, {"content": "a"}, {})):
                self.say(b"data: %b\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode())
                if number < 2:
                    read.wait(0.2)
            self.say(b"data: [DONE]\n\n")
            self.say(b"")

        def say(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Streaming) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = BlockingHttpClient(server.server_port)
        spent = [web.stream("what is it ?", 2) for _ in range(2)]
        web.close()
        server.shutdown()
    for each in spent:
        assert each.first_s is not None and 0.2 <= each.first_s <= each.whole_s - 0.15


@pytest.mark.exhaustive
@pytest.mark.slow
def test_direct_requests_run_on_the_serving_engine() -> None:
    question = "is there a red disc in this picture"
    processor = InputProcessor.from_pretrained(str(checkpoint_path()))
    prompt_ids = processor.encode(processor.chat(question)).prompt_ids
    with (
        tempfile.TemporaryDirectory() as folder,
        launched_server("benchmarks.instrumented_engine", path := f"{folder}/engine") as server,
        Client(port=server.rpyc_port) as client,
        contextlib.closing(connection.Client(path)) as engine,
    ):
        engine.send(DirectRequest(prompt_ids, 5))
        timed_tokens = engine.recv()
        assert [len(new_ids) for _, new_ids in timed_tokens] == [1] * 5
        assert 0 < timed_tokens[0][0] < timed_tokens[-1][0]
        token_ids = [token for _, new_ids in timed_tokens for token in new_ids]
        assert client.generate(question, max_tokens=5).text == processor.decode(token_ids)
        assert client.stats().num_finished == 2


def test_terminating_a_bench_ends_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server here is a script that prints its ready line and sleeps."""
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\necho 'ready: rpyc localhost:1 | http localhost:2 | model'\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, launched_server("vlora.cli", "serve") as server:
        assert (server.rpyc_port, server.http_port) == (1, 2) and server.front_end.is_running()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert left.value.code == 128 + signal.SIGTERM
    assert not server.front_end.is_running() and signal.getsignal(signal.SIGTERM) is before
