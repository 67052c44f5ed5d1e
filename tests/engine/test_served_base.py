"""Clients compute with the W0 that an engine has in memory, while it serves requests with merged weights."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import subprocess
import sys
import threading
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from tests.families import FAMILIES
from tests.processes import free_port, until
from tests.processors import write_checkpoint
from tests.split.test_equality import WITHIN, apart, losses
from tests.split.test_faults import GOOD, WRONG, admitted, all_of
from tests.training.beside import Alone, Case, losses_of
from vlora.config import EngineConfig, ServedBase, Token
from vlora.engine import Engine, LocalEngine, device_runtime
from vlora.engine.base_service import base_layers
from vlora.engine.ipc import messages
from vlora.errors import BadConfig, Unauthorized
from vlora.memory.arena import PAGE_BYTES
from vlora.models.pretrained import from_pretrained
from vlora.operations import ListTrainings
from vlora.split import connect, transport
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.serving import load_base
from vlora.types import Request, SamplingParams
from vlora.wire.address import Address

T = TypeVar("T")


def plain_model(folder: str) -> Any:
    """The checkpoint as a client loads it."""
    return from_pretrained(AutoModelForImageTextToText, folder, dtype=torch.float32).eval().requires_grad_(False)


def config(folder: str, *addresses: str, **settings: Any) -> EngineConfig:
    base = ServedBase(addresses=addresses, name="tiny") if addresses else None
    fields = {"model": folder, "dtype": "float32", "threads": 1, "block_size": 8, "max_batch_size": 4}
    fields |= {"arena_bytes": 1024 * PAGE_BYTES, "switching": "shadow", "prefix_cache": False}
    return EngineConfig(**{**fields, "serve_base": base, **settings})


class Running:
    """A `LocalEngine` with its event loop in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.local = LocalEngine(config)
        self.wait(self.local.stats())  # the engine's thread begins with the first call

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _answer(self, request: Request) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for output in self.local.generate(request):
            assert output.error is None
            found += tuple(output.token_ids)
        return found

    def answers(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The tokens of requests that run at the same time."""

        async def together() -> list[tuple[int, ...]]:
            return list(await asyncio.gather(*map(self._answer, requests)))

        return self.wait(together())

    def close(self) -> None:
        self.wait(self.local.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def running(config: EngineConfig) -> Iterator[Running]:
    engine = Running(config)
    try:
        yield engine
    finally:
        engine.close()


def write_adapter(folder: Path, model: Any) -> str:
    """A LoRA of the language model with large factors, in PEFT's format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = get_peft_model(
            copy.deepcopy(model),
            LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"),
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    peft.save_pretrained(str(folder))
    return str(folder)


def request(number: int, adapter: str | None, num_tokens: int = 8) -> Request:
    generator = torch.Generator().manual_seed(number)
    ids = tuple(torch.randint(4, 150, (7,), generator=generator).tolist())
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_ids=ids, adapter=adapter, sampling=sampling)


__all__ = ["Running", "config", "plain_model", "request", "running", "write_adapter", "write_checkpoint"]


@pytest.fixture(scope="module", params=["qwen2_vl", pytest.param("llava", marks=pytest.mark.exhaustive)])
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


ROOT = Path(__file__).parents[2]
REQUESTS = [request(number, "merged" if number % 4 else None) for number in range(8)]
PLAIN_REQUESTS = [request(number, None) for number in range(4)]


class Trainer(threading.Thread):
    """Trains a LoRA through the base at an address. Its losses must be those of PEFT alone."""

    def __init__(self, address: str, model: Any, family: str = "qwen2_vl") -> None:
        super().__init__()
        self._address, self._model, self._family = address, model, family
        self._plain = losses("lora", family, copy.deepcopy(model))
        self._found: list[float] = []
        self.num_repeated = 0

    def run(self) -> None:
        with connect(self._address) as base:
            self._found = losses("lora", self._family, base.wrap(copy.deepcopy(self._model)))
            self.num_repeated = base.num_repeated

    def check(self) -> None:
        self.join()
        assert apart(self._found, self._plain) < WITHIN


def test_a_client_trains_on_w0_while_an_adapter_is_merged(
    family: str, checkpoint: str, model: Any, adapter: str, tmp_path: Path
) -> None:
    with running(config(checkpoint, policy="merged_only")) as engine:
        engine.wait(engine.local.load_adapter("merged", adapter))
        expected = engine.answers(REQUESTS)
    address = f"unix:{tmp_path}/base.sock"
    client = Trainer(address, model, family)
    with running(config(checkpoint, address, policy="merged_only", train_slowdown=2.0)) as engine:
        engine.wait(engine.local.load_adapter("merged", adapter))
        client.start()
        rounds = 0
        while client.is_alive():
            assert engine.answers(REQUESTS) == expected
            rounds += 1
        stats = engine.wait(engine.local.stats())
    client.check()
    assert rounds > 1 and stats.steps_by_mode["merged"] > rounds, "nothing was merged meanwhile"
    assert stats.num_base_calls > 0 and stats.num_base_rows > 0 and stats.base_s > 0
    # A base with the merged weights would be noticed.
    merged = PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload()
    plain = losses("lora", family, copy.deepcopy(model))
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


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("one") / "model", "qwen2_vl")


def test_clients_that_fail_harm_neither_requests_nor_other_clients(one: str, tmp_path: Path) -> None:
    """Nonsense, half a call, and clients that leave while their calls are computed."""
    address = f"127.0.0.1:{free_port()}"
    client = Trainer(address, plain_model(one))
    with running(config(one)) as engine:
        expected = engine.answers(PLAIN_REQUESTS)
    with running(config(one, address, train_slowdown=2.0)) as engine:
        client.start()
        while client.is_alive():
            for head, reason in WRONG.values():
                sock, _ = admitted(address)
                sock.sendall(head.pack() + bytes(min(head.num_bytes, 256)))
                assert reason in all_of(sock)[16:].decode()
            for sent in (GOOD.pack()[:7], GOOD.pack() + bytes(256)):
                sock, _ = admitted(address)
                sock.sendall(sent)
                sock.close()
            assert engine.answers(PLAIN_REQUESTS) == expected
        until(lambda: engine.wait(engine.local.stats()).num_base_clients == 0)
    client.check()


def test_a_client_and_a_training_of_the_engine_change_nothing_in_each_other(tmp_path: Path) -> None:
    """Losses of the plan's training are bit for bit those of one alone, and those of the client are PEFT's."""
    case, address = Case.make(tmp_path / "case"), f"unix:{tmp_path}/base.sock"
    client = Trainer(address, plain_model(case.model))
    settings = case.config(train=str(case.plan("beside", ["first"])), serve_base=ServedBase(addresses=(address,)))
    with running(settings) as engine:
        client.start()
        client.check()
        until(lambda: engine.wait(engine.local.call(ListTrainings()))[0].state == "finished")
    assert losses_of(case.folder / "beside" / "first") == Alone(case, ["first"]).losses["first"]


def test_a_client_goes_on_with_the_next_engine_at_the_address(one: str, tmp_path: Path) -> None:
    """Twice, at any call; the client knows of no engine."""
    address = f"unix:{tmp_path}/base.sock"
    client = Trainer(address, plain_model(one))
    for place in range(3):
        with running(config(one, address)) as engine:
            if not place:
                client.start()
            until(lambda: engine.wait(engine.local.stats()).num_base_calls > 20)
            if place == 2:
                client.check()
    assert client.num_repeated >= 2


def test_tokens_and_addresses_are_those_of_the_settings(one: str) -> None:
    port = free_port()
    token = Token(name="trainer", secret="s" * 16)
    settings = config(one, f"127.0.0.1:{port}")
    assert settings.serve_base is not None
    settings = dataclasses.replace(settings, serve_base=dataclasses.replace(settings.serve_base, tokens=(token,)))
    sent = messages.decode_to_engine(messages.encode(messages.Start(settings)))
    assert isinstance(sent, messages.Start) and sent.config == settings and "s" * 16 not in repr(sent)
    with running(sent.config):
        with pytest.raises(Unauthorized, match="requires a token"):
            connect(f"127.0.0.1:{port}")
        with connect(f"127.0.0.1:{port}", token="s" * 16) as base:
            assert base.calls.groups


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("free", "taken"), {}, "another process listens there; choose another path"),
    (("free", "127.0.0.1:0"), {}, "address '127.0.0.1:0' has no port; choose one"),
    (("free", "0.0.0.0:4711"), {}, "without authentication a base model is served on loopback only"),
    (("free", "nowhere"), {}, "write HOST:PORT or unix:PATH"),
    (("free",), {"switching": "in_place"}, "start with --switching shadow"),
    (("free",), {"quantize": "int8"}, "quantize none, not int8"),
    (("free",), {"tensor_parallel": 2}, "tensor_parallel 1, not 2"),
    (("free",), {"switching": "auto"}, "serve_base needs W0 in memory while an adapter is merged"),  # and has no room
    (("free",), {"model": "qwen_vl"}, "serve_base is not possible with qwen_vl"),  # of this project's code
]


@pytest.mark.parametrize(("addresses", "settings", "reason"), REFUSED, ids=[reason[:30] for *_, reason in REFUSED])
def test_an_engine_that_cannot_serve_its_base_does_not_start(
    one: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    addresses: tuple[str, ...],
    settings: dict[str, Any],
    reason: str,
) -> None:
    """One line each; no socket is left."""
    monkeypatch.setattr(device_runtime, "shadow_fits", lambda *_: False)
    own = [f"unix:{tmp_path}/{name}.sock" if name in ("free", "taken") else name for name in addresses]
    folder = write_checkpoint(tmp_path / "model", settings["model"]) if "model" in settings else one
    taken = transport.listen(Address.parse(f"unix:{tmp_path}/taken.sock"))
    with taken, pytest.raises(BadConfig, match=reason) as raised:
        Engine(config(folder, *own, **{**settings, "model": folder}))
    assert "\n" not in str(raised.value) and not (tmp_path / "free.sock").exists()


def test_an_engine_without_clients_does_trainings_only(one: str) -> None:
    engine = Engine(config(one))
    assert engine.parts.other_work is engine.parts.trainings
    engine.close()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_engine_without_clients_loads_no_part_of_the_split() -> None:
    code = "import sys, vlora.engine.local; assert not [name for name in sys.modules if name.startswith('vlora.split')]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
