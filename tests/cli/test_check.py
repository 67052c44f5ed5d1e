"""`vlora check` shows what an engine of the same settings has, without reading weights."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fusion.embedded import checkpoint_path
from tests.cli.conftest import Vlora
from tools.embedded_model.model import build_model
from vlora.config import EngineConfig, Quantize
from vlora.engine import LocalEngine
from vlora.errors import BadConfig, OverCapacity
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import dummy_model, load_model, read_config
from vlora.models.processing import InputProcessor

ARENA = 24 * 2**20
LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model's folder."""
    return shutil.copytree(checkpoint_path(), tmp_path / "model")


@pytest.mark.parametrize(("quantize", "head"), [("none", False), ("fp8", False), ("int8", True), ("int4", True)])
def test_the_figures_are_those_of_an_engine(
    quantize: Quantize, head: bool, tmp_path: Path, vlora_command: Vlora
) -> None:
    settings = ("--arena-bytes", str(ARENA), "--quantize", quantize, *["--quantize-head"] * head)
    (found,) = vlora_command.json("check", "embedded", *settings, "--rank", "64")
    assert found["problems"] == [] and found["quantize"] == quantize
    local = LocalEngine(
        EngineConfig(model=str(checkpoint_path()), arena_bytes=ARENA, quantize=quantize, quantize_head=head, threads=1),
    )
    device = local.engine.parts.device
    model = device.hf_model.model
    linears = (*device.slabs.linears.values(), device.hf_model.lm_head)
    quantized = [linear.quantized for linear in linears if linear.quantized is not None]
    packed = sum(math.prod(weight.shape) - weight.values.numel() for weight in quantized)
    untied = math.prod(quantized[-1].shape) if head else 0  # a quantized head is apart from the embeddings
    assert found["num_parameters"] == sum(tensor.numel() for tensor in model.parameters()) + packed - untied
    held = (*model.parameters(), *model.buffers(), *(weight.scales for weight in quantized))
    assert found["weight_bytes"] == sum(tensor.nbytes for tensor in held)
    assert found["dtype"] == str(device.hf_model.dtype).removeprefix("torch.")
    assert found["max_context"] == device.limits.max_context
    assert (found["switching"], found["shadow_bytes"]) == ("shadow", device.slabs.num_bytes)
    assert found["arena_bytes"] == device.limits.num_pages * PAGE_BYTES
    config = LoraConfig(r=64, target_modules=LINEARS, init_lora_weights=False)
    get_peft_model(build_model(0), config).save_pretrained(str(tmp_path / "adapter"))
    pinned = 0
    adapters = ("--rank", "64", "--adapters")
    beside = {count: vlora_command.json("check", "embedded", *settings, *adapters, count)[0] for count in (0, 2, 999)}
    with pytest.raises(OverCapacity):
        while True:
            if pinned in beside:
                assert beside[pinned]["kv_tokens"] == local.engine.stats().free_blocks * 16
            status = local.engine.load_adapter(f"adapter{pinned}", str(tmp_path / "adapter"))
            assert status.num_bytes == found["adapter_bytes"]
            local.engine.pin_adapter(status.name, True)
            pinned += 1
    assert pinned == found["num_adapters"] > 1
    assert beside[999]["kv_tokens"] == local.engine.stats().free_blocks * 16


def write_holes(file: Path, shapes: dict[str, list[int]]) -> None:
    """Weights in bfloat16 as a sparse file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)


def test_memory_of_another_machine_decides(folder: Path, vlora_command: Vlora) -> None:
    """Eight layers of a 7B model, with sparse weights on the disk."""
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    heads = {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096}
    config["text_config"] |= heads | sizes
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dummy_model(read_config(str(folder)), "auto", torch.device("meta"), 0).state_dict()
    write_holes(folder / "model.safetensors", {name: list(tensor.shape) for name, tensor in shapes.items()})
    check = ("check", folder, "--device", "cuda", "--memory-gib")
    language = 8 * (4 * 4096 * 4096 + 3 * 4096 * 11008) * 2
    for gib, switching in ((10, "shadow"), (5, "in_place")):
        (found,) = vlora_command.json(*check, gib, "--max-batch-size", "2")
        assert (found["switching"], found["memory_bytes"]) == (switching, gib * 2**30)
        assert found["shadow_bytes"] == (language if switching == "shadow" else 0)
        assert language < found["weight_bytes"] < language * 1.1
        assert found["kv_token_bytes"] == 8 * 2 * 4096 * 2
        assert found["adapter_bytes"] == 8 * 16 * (8 * 4096 + 3 * (4096 + 11008)) * 2
    (found,) = vlora_command.json(*check, "5", "--max-batch-size", "2", "--quantize", "fp8")
    assert found["switching"] == "shadow" and found["shadow_bytes"] < 0.501 * language
    assert 0.5 * language < found["weight_bytes"] < 0.6 * language
    out = vlora_command.out(*check, "10", "--dtype", "float32", "--quantize", "fp8", code=1)
    assert "problem     quantize fp8 on a GPU needs dtype bfloat16; the weights are torch.float32" in out
    out = vlora_command.out(*check, "2.5", code=1)
    assert "problem     its weights take " in out and "adapters" not in out


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without(file: Path, part: str, **more: torch.Tensor) -> None:
    """Rewrite weights without the tensors with `part` in their name, and with more."""
    kept = {name: tensor for name, tensor in load_file(file).items() if part not in name}
    save_file(kept | more, file, {"format": "pt"})


LAYER = "model.language_model.layers.1.mlp.up_proj"
STORED = "language_model.model.layers.1.mlp.up_proj"


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def weights(part: str, **more: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: without(folder / "model.safetensors", part, **more)


TEXT_ONLY = "{% for m in messages %}{{ m.content }}{% endfor %}"
PATCHES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 7}
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensor": (weights(STORED), f"its files lack {LAYER}.weight; the"),
    "scales": (
        weights("no tensor", **{f"{LAYER}.weight_scale": torch.ones(1)}),
        f"has {LAYER}.weight_scale, a tensor of weights that are stored quantized, but its config.json has no",
    ),
    "shape": (
        weights(f"{STORED}.weight", **{f"{STORED}.weight": torch.ones(3, 2)}),
        f"its files have {LAYER}.weight with the shape [3, 2], the configuration has [",
    ),
    "end tokens": (text("generation_config.json", "{"), "generation_config.json: "),
    "text": (
        text("chat_template.jinja", TEXT_ONLY),
        "takes text only: it prints a message's parts as a list; copy this model's template for pictures into",
    ),
    "no list": (
        text("chat_template.jinja", "{{ 'a' + messages[0].content }}"),
        "takes no pictures (the model's chat template rejects these messages: can only concatenate str",
    ),
    "patches": (
        lambda folder: change(folder / "processor_config.json", image_processor=PATCHES),
        "does not fit the vision tower of this llava model: it makes pixel_values of shape",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_is_named_by_check_and_by_an_engine_or_a_front_end(
    name: str, folder: Path, vlora_command: Vlora
) -> None:
    """Files that are missing or damaged: tests/hub/test_parts.py."""
    breakage, named = BROKEN[name]
    breakage(folder)
    code, out, error = vlora_command("check", str(folder))
    assert code in (1, 2) and named in out + error
    with pytest.raises(BadConfig) as refused:
        load_model(EngineConfig(model=str(folder)))
        InputProcessor.from_pretrained(str(folder))
    assert named in str(refused.value)


def test_models_that_are_not_served_are_one_line(folder: Path, vlora_command: Vlora) -> None:
    config = json.loads((folder / "config.json").read_text())
    for own, expected in (
        ({"model_type": "mllama"}, "model type 'mllama' is not supported: it reads images through cross-attention"),
        (config | {"model_type": "paligemma"}, "cannot load model"),
        (config | {"text_config": 7}, "cannot load model"),
    ):
        (folder / "config.json").write_text(json.dumps(own))
        assert vlora_command.refusal("check", folder).startswith(expected)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    assert "cannot load the tokenizer of" in vlora_command.refusal("check", folder)


@pytest.mark.parametrize(
    ("wanted", "shown"), [(1, "adapters    1 of rank 16"), (20, "all 20 of rank 16"), (5000, " of 5,000 of rank 16")]
)
def test_the_number_of_adapters_that_are_on_the_device(wanted: int, shown: str, vlora_command: Vlora) -> None:
    command = ("check", "embedded", "--arena-bytes", str(256 * 2**20), "--adapters", wanted)
    out = vlora_command.out(*command)
    (line,) = (line for line in out.splitlines() if line.startswith("adapters"))
    assert shown in line and re.search(r"^KV cache    [\d,]+ tokens beside these adapters$", out, re.M)
    assert ("; there is room for " in line) == (wanted < 5000)
    (enough,) = re.findall(r"--arena-bytes (\d+) has room for all", line) or ["0"]
    (found,) = vlora_command.json(*command[:3], int(enough) or 256 * 2**20, "--adapters", wanted)
    assert found["num_adapters"] >= wanted and found["kv_tokens"] > 0
    if wanted == 5000:  # room for no more than the wanted
        assert found["num_adapters"] < 5002


def test_the_text_shows_every_figure(vlora_command: Vlora) -> None:
    out = vlora_command.out("check", "embedded", "--memory-gib", "1", "--rank", "8")
    figures = ["family", "chat", "text model", "weights", "context", "memory", "adapters", "KV cache", "checkpoint"]
    assert [line.split("  ")[0] for line in out.splitlines()] == figures
    assert "memory      1.0 GiB on cpu: weights " in out and "checkpoint  complete, 1 file of weights" in out
