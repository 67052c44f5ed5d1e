"""Code in a checkpoint is never run: a model that needs it is rejected by name, without a prompt on the terminal."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import logging

from fusion.embedded import checkpoint_path
from tests.families import build_model
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.models.loading import load_model, read_config
from vlora.models.pretrained import from_pretrained
from vlora.models.processing import InputProcessor
from vlora.tune import shapes_of

_OWN = "raise SystemExit('code was run without permission')"


@pytest.fixture(autouse=True)
def no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompted(text: str = "") -> str:
        raise AssertionError(f"prompt on the terminal: {text}")

    monkeypatch.setattr(builtins, "input", prompted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model, with a code file in its folder."""
    made = tmp_path / "model"
    shutil.copytree(checkpoint_path(), made)
    (made / "own.py").write_text(_OWN)
    return made


def change(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))


@pytest.mark.parametrize(
    "read",
    [
        read_config,
        lambda model: load_model(EngineConfig(model=model)),
        lambda model: load_model(EngineConfig(model=model, load_format="dummy")),
        shapes_of,
        InputProcessor.from_pretrained,
    ],
    ids=["config", "weights", "random weights", "tune", "front end"],
)
def test_a_model_that_needs_custom_code_is_refused(folder: Path, read: Any) -> None:
    change(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})
    with pytest.raises(BadConfig, match=r"model' needs custom code \(auto_map\) for AutoConfig,") as error:
        read(str(folder))
    assert "trust_remote_code" not in str(error.value), "this setting does not exist here"


def test_an_unavailable_hub_model_is_refused_with_a_remedy(folder: Path) -> None:
    with pytest.raises(BadConfig, match=r"(?s)cannot load model 'no-such/model': .*HTTPS_PROXY.*HF_ENDPOINT.*HF_HOME"):
        read_config("no-such/model")
    (folder / "config.json").unlink()
    with pytest.raises(BadConfig, match="cannot load model") as refused:
        read_config(str(folder))
    assert "HF_ENDPOINT" not in str(refused.value), "a folder is not searched for on the hub"


@pytest.mark.parametrize(
    ("kind", "file", "fields"),
    [
        (AutoTokenizer, "tokenizer_config.json", {"tokenizer_class": "Own"}),
        (AutoImageProcessor, "preprocessor_config.json", {"image_processor_type": "Own"}),
        (AutoProcessor, "processor_config.json", {"processor_class": "Own"}),
    ],
)
def test_a_tokenizer_or_processor_that_needs_custom_code_is_refused(
    tmp_path: Path, kind: Any, file: str, fields: dict[str, Any]
) -> None:
    (tmp_path / "own.py").write_text(_OWN)
    own = ["own.Own", "own.Own"] if kind is AutoTokenizer else "own.Own"
    change(tmp_path / file, auto_map={kind.__name__: own}, **fields)
    with pytest.raises(BadConfig, match=f"needs custom code .* for {kind.__name__},"):
        from_pretrained(kind, tmp_path)


def test_code_files_beside_a_supported_checkpoint_are_ignored(folder: Path) -> None:
    plain = InputProcessor.from_pretrained(str(checkpoint_path()))
    change(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForImageTextToText": "own.Own"})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    change(folder / "processor_config.json", auto_map={"AutoProcessor": "own.Own", "AutoImageProcessor": "own.Own"})
    model = load_model(EngineConfig(model=str(folder)))
    assert type(model).__module__.startswith("transformers.")
    processor = InputProcessor.from_pretrained(str(folder))
    assert processor.encode("what is shown ?").prompt_ids == plain.encode("what is shown ?").prompt_ids
    assert type(processor.image_processor) is type(plain.image_processor)


def test_other_errors_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(AutoConfig, tmp_path / "nowhere")


def test_progress_bars_are_shown_on_terminals_only(capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    from_pretrained(AutoModelForImageTextToText, checkpoint_path())
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "missing",
    [f"model.language_model.layers.0.{name}" for name in ("mlp.up_proj.weight", "self_attn.q_proj.bias")]
    + ["lm_head.weight"],
)
def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path: Path, missing: str) -> None:
    """transformers would draw the weights at random, and log a warning only."""
    model = build_model("qwen2_vl")
    model.save_pretrained(tmp_path)
    load_model(EngineConfig(model=str(tmp_path)))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (stored,) = (name for name in tensors if name.endswith(missing.removeprefix("model.language_model.")))
    save_file({name: tensor for name, tensor in tensors.items() if name != stored}, file, metadata={"format": "pt"})
    with pytest.raises(BadConfig, match=f"its files lack {missing}; the checkpoint is incomplete"):
        load_model(EngineConfig(model=str(tmp_path)))
