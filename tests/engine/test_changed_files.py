"""Files of loaded content that are overwritten in place or truncated change no answer, and end no process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.asking import ask
from tests.families import HIDDEN, LANGUAGE_LINEARS, Prompt, build_model, make_prompt
from tests.harness import FixedModes
from tests.oracle import save_adapter
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import EngineDead
from vlora.types import Mode, Request, RequestOutput, SamplingParams

FAMILY = "qwen2_5_vl"
ADAPTERS = {
    "factors": LoraConfig(r=4, target_modules=LANGUAGE_LINEARS),
    "biases": LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only"),
    "magnitudes": LoraConfig(r=4, target_modules=["v_proj"], use_dora=True),
    "own head": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "own factors": LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=list(range(3, 60, 3))),
    "projector": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["attn.proj"]),
    "heads": LoraConfig(r=4, target_modules=["q_proj"]),
}


def save(folder: Path, model: Any) -> None:
    model.save_pretrained(folder / "model")
    for name, config in ADAPTERS.items():
        save_adapter(model, config, folder / name)
    spec = HeadSpec(name="kind", task="classification", labels=("x", "y"), prompt="?", num_frames=1, hidden_size=HIDDEN)
    save_heads(folder / "heads", {"kind": TaskHead(spec, torch.randn(2, HIDDEN), torch.zeros(2))})


def write_into(folder: Path, *, truncate: bool) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("r+b") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                stream.write(b"" if truncate else os.urandom(size))
                if truncate:
                    stream.truncate()


def mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


class Served:
    def __init__(self, folder: Path, **settings: object) -> None:
        model = build_model(FAMILY)
        save(folder, model)
        self.prompt: Prompt = make_prompt(FAMILY, model, 1, num_images=1)
        fixed = {"arena_bytes": 2**26, "threads": 1, "prefix_cache": False, **settings}
        self.local = LocalEngine(EngineConfig(model=str(folder / "model"), **fixed))  # type: ignore[arg-type]
        self.local.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED, None)
        for name in ADAPTERS:
            self.local.engine.load_adapter(name, str(folder / name))

    def answers(self, *names: str | None) -> Mapping[str, object]:
        """Of requests one by one: the rounding of products depends on the batch."""
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
        found = {}
        for name in names:
            request = ask(self.prompt, "r", name, head="kind" if name == "heads" else None, sampling=sampling)
            found[str(name)] = self.what(self.local.run([request])["r"])
        return found

    @staticmethod
    def what(outputs: list[RequestOutput]) -> object:
        assert outputs[-1].error is None, outputs[-1].error
        return [(one.token_ids, one.scores, one.head and one.head.scores) for one in outputs]


RANKS = pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow)


@pytest.fixture(params=[{}, {"quantize": "int8"}, {"switching": "in_place"}, RANKS], ids=str)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, **request.param)
    yield served
    served.local.engine.close()


@pytest.mark.parametrize("truncate", [False, True], ids=["overwritten", "truncated"])
def test_answers_do_not_follow_the_files(served: Served, tmp_path: Path, truncate: bool) -> None:
    in_place = served.local.engine.parts.device.switcher.in_place
    before = served.answers(None, *ADAPTERS)
    versions = {status.name: status.version for status in served.local.engine.adapters()}
    for name in ("model", *ADAPTERS):
        if name != "model" or not in_place:
            assert not mapped(tmp_path / name), f"truncating {name} would end the process"
            write_into(tmp_path / name, truncate=truncate)
    assert served.answers(None, *ADAPTERS) == before
    assert versions == {status.name: status.version for status in served.local.engine.adapters()}


@pytest.mark.parametrize("change", ["overwritten", "truncated", "replaced", "removed"])
def test_weights_that_switches_restore_are_not_read_from_a_changed_file(tmp_path: Path, change: str) -> None:
    served = Served(tmp_path, switching="in_place")
    device, file = served.local.engine.parts.device, tmp_path / "model" / "model.safetensors"
    served.answers("factors")
    key = served.local.engine.parts.registry.get("factors").key
    device.switcher.switch(None)
    wanted = {name: linear.weight.clone() for name, linear in device.slabs.linears.items()}
    with torch.no_grad():
        device.switcher.switch(key)
        if change in ("overwritten", "truncated"):
            time.sleep(0.01)  # longer than the resolution of a file's time
            write_into(file.parent, truncate=change == "truncated")
            with pytest.raises(EngineDead, match=r"was written to or touched .*, and in_place switching"):
                device.switcher.switch(None)
            with pytest.raises(EngineDead, match="start again"):  # and no step is answered with wrong weights
                served.answers(None)
            return
        if change == "replaced":
            (tmp_path / "other").write_bytes(os.urandom(file.stat().st_size))
            os.replace(tmp_path / "other", file)
        else:
            file.unlink()
        device.switcher.switch(None)
    assert all(torch.equal(linear.weight, wanted[name]) for name, linear in device.slabs.linears.items())
    served.local.engine.close()


@pytest.mark.slow
def test_content_that_another_rank_can_no_longer_read_is_refused_by_name(tmp_path: Path) -> None:
    """Rank 0 has read it when it was loaded; the other rank reads it when a request first needs it."""
    served = Served(tmp_path, tensor_parallel=2)
    weights = {name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ADAPTERS}
    changes = {"factors": weights["factors"][:-4] + b"abcd", "biases": b"", "own head": weights["tokens"]}
    for name, content in changes.items():
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
    (tmp_path / "projector").rename(tmp_path / "moved")
    wanted = served.answers(None, "tokens")
    for name in (*changes, "projector"):
        request = Request(request_id=name, prompt_ids=served.prompt.prompt_ids[:5], adapter=name)
        error = served.local.run([request])[name][-1].error
        assert error is not None and error.code == "bad_adapter" and f"adapter {name!r}" in error.message, error
    assert served.answers(None, "tokens") == wanted
    for name, content in weights.items():
        if name in changes:
            (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
    assert served.answers(*changes), "with the registered content again"
    (tmp_path / "factors" / "adapter_model.safetensors").write_bytes(changes["factors"])
    served.local.engine.load_adapter("factors", str(tmp_path / "factors"))
    assert served.answers("factors")
    served.local.engine.close()
