"""`vlora convert-lora`: the nearest LoRA of LoHa and LoKr adapters, compared with PEFT and a dense decomposition."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from peft import LoHaConfig, LoKrConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import peft_answer
from tests.references import assert_same
from vlora.cli import cli
from vlora.errors import BadAdapter, BadConfig
from vlora.lora.dense_to_lora import convert, total_error
from vlora.types import Mode

FAMILY = "qwen2_vl"
NUM_TOKENS = 6
TARGETS = ["q_proj", "v_proj", "down_proj"]
PATTERNS: dict[str, Any] = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {r"layers\.1\..*q_proj": 9}}
CONFIGS = {
    "loha": LoHaConfig(r=4, alpha=6, target_modules=TARGETS, init_weights=False, **PATTERNS),
    "lokr": LoKrConfig(r=2, alpha=3, target_modules=TARGETS, init_weights=False, **PATTERNS),
    "lokr of two products": LoKrConfig(
        r=2, alpha=3, target_modules=TARGETS, init_weights=False, decompose_both=True, decompose_factor=8
    ),
    "lokr of whole matrices": LoKrConfig(r=64, alpha=64, target_modules=TARGETS, init_weights=False),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(FAMILY)


@pytest.fixture(scope="module", params=CONFIGS)
def adapter(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    peft = get_peft_model(copy.deepcopy(model), copy.deepcopy(CONFIGS[request.param]))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "hada_" in name or "lokr_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    peft.save_pretrained(str(folder))
    return folder


def deltas_of_peft(model: Any, adapter: Path) -> dict[str, torch.Tensor]:
    peft = PeftModel.from_pretrained(copy.deepcopy(model), str(adapter))
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in peft.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@pytest.mark.parametrize("rank", [1, 5, 400])
def test_each_layer_is_the_nearest_of_its_rank(model: Any, adapter: Path, rank: int, tmp_path: Path) -> None:
    layers = convert(adapter, tmp_path / "out", rank)
    tensors = load_file(str(tmp_path / "out/adapter_model.safetensors"))
    deltas = deltas_of_peft(model, adapter)
    assert [layer.layer for layer in layers] == sorted(deltas)
    lost = whole = 0.0
    for layer in layers:
        a, b = (tensors[f"base_model.model.{layer.layer}.lora_{side}.weight"] for side in "AB")
        delta = deltas[layer.layer]
        values = torch.linalg.svdvals(delta.double())
        error = float((b @ a - delta).norm() / delta.norm())
        assert a.shape[0] == layer.rank <= rank
        assert error == pytest.approx(layer.error, abs=1e-5)
        assert error == pytest.approx(float(values[rank:].norm() / values.norm()), abs=1e-5)
        lost, whole = lost + float((b @ a - delta).square().sum()), whole + float(delta.square().sum())
    assert total_error(layers) == pytest.approx((lost / whole) ** 0.5, abs=1e-5)
    assert total_error(layers) < 1e-6 if rank == 400 else rank > 1 or total_error(layers) > 0.1


class NoAdapters:
    """A reference without adapters."""

    family = FAMILY
    adapters: ClassVar[dict[str, str]] = {}


def test_at_a_sufficient_rank_answers_are_those_of_the_original(model: Any, adapter: Path, tmp_path: Path) -> None:
    prompt = make_prompt(FAMILY, model, 0, num_images=1)
    engine = RecordingEngine(NoAdapters(), FixedModes(Mode.UNMERGED))
    with pytest.raises(BadAdapter, match=r"a dense delta; make it a LoRA with `vlora convert-lora .* --rank R`"):
        engine.engine.load_adapter("original", str(adapter))
    convert(adapter, tmp_path / "out", 64)
    engine.engine.load_adapter("converted", str(tmp_path / "out"))
    assert_same(
        engine.answer([("converted", prompt)], NUM_TOKENS)[0], peft_answer(model, str(adapter), prompt, NUM_TOKENS)
    )


@pytest.fixture
def copied(adapter: Path, tmp_path: Path) -> Path:
    """An adapter that a test may corrupt."""
    return Path(shutil.copytree(adapter, tmp_path / "copied"))


@pytest.mark.parametrize(
    ("setting", "value"), [("setting_of_a_later_version", 1), ("modules_to_save", ["lm_head"]), ("peft_type", "IA3")]
)
def test_settings_that_are_not_converted_are_refused(setting: str, value: object, copied: Path) -> None:
    file = copied / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), setting: value}))
    with pytest.raises(BadAdapter, match=setting):
        convert(copied, copied.with_name("out"), 4)
    assert not copied.with_name("out").exists()


def test_an_output_that_exists_or_cannot_be_made_is_refused(copied: Path) -> None:
    with pytest.raises(BadConfig, match="already exists"):
        convert(copied, copied, 4)
    out = copied / "adapter_config.json" / "out"
    with pytest.raises(BadConfig, match=f"cannot write '{out}': Not a directory"):
        convert(copied, out, 4)


def test_the_command_prints_the_error_of_each_layer(copied: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for process in (ended.pid, 1):
        (copied.parent / f"unfinished-{process}-{copied.name}-lora2").mkdir()
    result = CliRunner().invoke(cli, ["convert-lora", str(copied), "--rank", "2", "--json"])
    (left,) = copied.parent.glob("unfinished-*")
    assert left.name.startswith("unfinished-1-"), "of a process that runs"
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["out"] == f"{copied}-lora2" and 0 < printed["error"] < 1 and len(printed["layers"]) == 12
    plain = CliRunner().invoke(cli, ["convert-lora", str(copied), "--rank", "2", "--out", f"{copied}-again"])
    assert f"all layers: error {printed['error']:.4f}" in plain.output
