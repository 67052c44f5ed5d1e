"""Several ranks: adapters loaded and pinned while requests run are on each rank, and a failed pin does not end the
replica.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.engine.asking import ask, tokens
from tests.families import build_model, make_prompt
from tests.oracle import Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadAdapter
from vlora.types import AdapterStatus

FAMILY = "llava"


def ended(local: LocalEngine, call: Future[AdapterStatus]) -> AdapterStatus:
    while not call.done():
        local.engine.step()
    return call.result()


@pytest.mark.slow
def test_every_rank_reads_adapters_while_steps_run(tmp_path: Path) -> None:
    model = build_model(FAMILY)
    model.save_pretrained(tmp_path / "model")
    folders = Oracle(FAMILY, model).save(tmp_path / "adapters")
    prompt = make_prompt(FAMILY, model, 0, num_images=1)
    answers: dict[int, list[list[int]]] = {}
    for size in (1, 2):
        config = EngineConfig(
            model=str(tmp_path / "model"), max_context=256, arena_bytes=64 * 2**20, tensor_parallel=size, threads=1
        )
        local = LocalEngine(config)
        try:
            engine = local.engine
            engine.load_adapter("mine", folders["narrow4"])
            engine.add(ask(prompt, "beside", "mine"))
            calls = [engine.load_in_background("mine", folders["wide8"]), engine.pin_in_background("mine")]
            assert [ended(local, call).loaded for call in calls] == [True, True]
            assert calls[1].result().pinned and calls[1].result().resident
            while engine.has_work:
                engine.step()
            found = [tokens(local.run([ask(prompt, "after", "mine")])["after"], "after")]
            with pytest.raises(BadAdapter):
                ended(local, engine.load_in_background("mine2", str(tmp_path / "nothing")))
            # Rank 0 has read it; the files change before another rank reads them.
            broken = tmp_path / f"broken{size}"
            shutil.copytree(folders["patterned16"], broken)
            ended(local, engine.load_in_background("broken", str(broken)))
            settings = json.loads((broken / "adapter_config.json").read_text())
            (broken / "adapter_config.json").write_text(json.dumps({**settings, "revision": "another"}))
            pinning = engine.pin_in_background("broken")
            if size == 1:
                assert ended(local, pinning).pinned, "it is not read again"
            else:
                with pytest.raises(BadAdapter, match=r"rank 1: .* its content is \w+, but \w+ was registered"):
                    ended(local, pinning)
                assert not any(status.resident for status in engine.adapters() if status.name == "broken")
            found.append(tokens(local.run([ask(prompt, "again", "mine")])["again"], "again"))
            assert found[0] == found[1]
            answers[size] = found
        finally:
            local.engine.close()
    assert answers[1] == answers[2]
