"""Clients compute with the W0 that an engine has in memory, while it serves requests with merged weights."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.engine.served_base import config, plain_model, request, running, write_adapter, write_checkpoint
from tests.families import FAMILIES
from tests.split.test_equality import WITHIN, apart, losses
from vlora.engine import Engine
from vlora.engine.base_service import base_layers
from vlora.errors import BadConfig
from vlora.split import connect
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.loading import load_base


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def model(checkpoint: str) -> Any:
    return plain_model(checkpoint)


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "merged", model)


REQUESTS = [request(number, "merged" if number % 4 else None) for number in range(8)]


def test_a_client_trains_on_w0_while_an_adapter_is_merged(
    family: str, checkpoint: str, model: Any, adapter: str, tmp_path: Path
) -> None:
    plain = losses("lora", family, copy.deepcopy(model))
    with running(config(checkpoint, policy="merged_only")) as engine:
        engine.wait(engine.local.load_adapter("merged", adapter))
        expected = engine.answers(REQUESTS)
    address = f"unix:{tmp_path}/base.sock"
    found: list[float] = []

    def train() -> None:
        with connect(address) as base:
            found.extend(losses("lora", family, base.wrap(copy.deepcopy(model))))

    with running(config(checkpoint, address, policy="merged_only", train_slowdown=2.0)) as engine:
        engine.wait(engine.local.load_adapter("merged", adapter))
        client = threading.Thread(target=train)
        client.start()
        rounds = 0
        while client.is_alive():
            assert engine.answers(REQUESTS) == expected
            rounds += 1
        stats = engine.wait(engine.local.stats())
    assert apart(found, plain) < WITHIN
    assert rounds > 1 and stats.steps_by_mode["merged"] > rounds, "nothing was merged meanwhile"
    assert stats.num_base_calls > 0 and stats.num_base_rows > 0 and stats.base_s > 0
    # A base with the merged weights would be noticed.
    merged = PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload()
    assert apart(losses("lora", family, merged.requires_grad_(False)), plain) > 1000 * WITHIN
    assert not (tmp_path / "base.sock").exists()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen_vl"])
def test_the_base_is_that_of_vlora_base_serve(family: str, tmp_path: Path) -> None:
    """Names, groups and values; the weights are those of the engine's memory, also while an adapter is merged."""
    folder = write_checkpoint(tmp_path / "model", family)
    engine = Engine(config(folder))
    device = engine.parts.device
    layers = base_layers(device)
    ours, theirs = BaseExecutor(layers), BaseExecutor(frozen_layers(load_base(folder, "float32")))
    assert ours.groups == theirs.groups and ours.fingerprint == theirs.fingerprint
    engine.load_adapter("merged", write_adapter(tmp_path / "adapter", plain_model(folder)))
    engine.pin_adapter("merged", True)
    own = {**device.hf_model.language_linears, **device.hf_model.vision_linears, "lm_head": device.hf_model.lm_head}
    assert own.keys() == layers.keys()
    assert all(layer.weight.data_ptr() == own[name].weight.data_ptr() for name, layer in layers.items())
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    (key,) = device.pool.resident
    device.switcher.switch(key)
    changed = [name for name, layer in layers.items() if layer.weight.data_ptr() != own[name].weight.data_ptr()]
    assert changed and all(name in device.slabs.slots for name in changed), "nothing was merged"
    assert all(torch.equal(layer.weight, before[name]) for name, layer in layers.items())
    engine.close()


def test_models_of_this_projects_code_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen_vl")
    with pytest.raises(BadConfig, match="serve_base is not possible with qwen_vl"):
        Engine(config(folder, f"unix:{tmp_path}/base.sock"))
    assert not (tmp_path / "base.sock").exists()
