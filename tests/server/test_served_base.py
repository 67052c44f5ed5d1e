"""`vlora serve --serve-base` in its own processes: a client goes on after kill -9 of the engine, and the metrics."""

from __future__ import annotations

import copy
import os
import signal
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.engine.served_base import plain_model, write_checkpoint
from tests.server.served import served
from tests.split.test_equality import WITHIN, apart, losses
from tests.split.test_faults import until
from vlora.split import connect


@pytest.mark.slow
def test_a_client_goes_on_after_kill_9_of_the_engine(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen2_vl")
    model, address = plain_model(folder), f"unix:{tmp_path}/base.sock"
    plain = losses("lora", "qwen2_vl", copy.deepcopy(model))
    found: list[float] = []
    repeated: list[int] = []

    def train() -> None:
        with connect(address) as base:
            found.extend(losses("lora", "qwen2_vl", base.wrap(copy.deepcopy(model))))
            repeated.append(base.num_repeated)

    arguments = ["--model", folder, "--dtype", "float32", "--switching", "shadow", "--arena-bytes", str(64 << 20)]
    with served(*arguments, "--serve-base", address) as on:
        client = threading.Thread(target=train)
        client.start()
        until(lambda: on.client.stats().num_base_calls > 20)
        (engine,) = psutil.Process(on.process.pid).children()
        os.kill(engine.pid, signal.SIGKILL)
        client.join()
        with urllib.request.urlopen(f"http://127.0.0.1:{on.http_port}/metrics") as page:
            lines = page.read().decode().splitlines()
        metrics = dict(line.split(" ") for line in lines if line.startswith("vlora_base"))
        assert float(metrics["vlora_base_rows_total"]) > float(metrics["vlora_base_calls_total"]) > 20
        assert float(metrics["vlora_base_seconds_total"]) > 0
    assert apart(found, plain) < WITHIN and repeated[0] >= 1
    assert "the engine is ready again" in on.log and not (tmp_path / "base.sock").exists()
