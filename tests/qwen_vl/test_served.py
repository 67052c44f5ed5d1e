"""Qwen-VL through `vlora serve` and HTTP, `vlora check` on its checkpoints, and broken ones, refused in one line."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from tests.qwen_vl.published import CONFIGS, make_adapter
from tests.server.served import served
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.model_check import check_model
from vlora.errors import BadConfig, UnsupportedModel, VLoraError
from vlora.models import InputProcessor
from vlora.models.loading import load_model, read_config
from vlora.models.processing import to_tensor
from vlora.types import Request, SamplingParams

ROOT = Path(__file__).parents[2]
QUESTION = "What is in the picture?"


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))


class Chat:
    """A chat checkpoint with one adapter for the published code, the weights of both, and a server of them."""

    def __init__(self, folder: Path) -> None:
        self.http_port = 0
        self.folder = folder / "model"
        base = small.random_weights()
        base["lm_head.weight"][small.NUM_RANKS :] *= 0.02  # answers are text
        small.write_checkpoint(self.folder, base, shards=2, pickled=True)
        self.weights: Mapping[str, Mapping[str, torch.Tensor]] = {
            "model": base,
            "tuned": make_adapter(base, CONFIGS["finetuned"], folder / "tuned"),
        }
        self.arguments = ["--model", str(self.folder), "--adapter", f"tuned={folder / 'tuned'}"]

    def ask(self, model: str, num_tokens: int) -> str:
        """The answer of a chat completion with a picture."""
        stream = io.BytesIO()
        picture().save(stream, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        body = {"model": model, "max_tokens": num_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/chat/completions",
            json.dumps({**body, "messages": [{"role": "user", "content": content}]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text

    def expected(self, model: str, num_tokens: int) -> str:
        """The same of the literal implementation."""
        processor = InputProcessor.from_pretrained(str(self.folder))
        prompt = processor.encode(processor.chat(QUESTION, 1), [picture()])
        pixels = to_tensor(prompt.vision[0].fields["pixel_values"])[0]
        tokens, _ = literal.generate(self.weights[model], prompt.prompt_ids, [pixels], num_tokens)
        ends = {small.END_OF_TEXT, small.END_OF_TEXT + 1, small.END_OF_TEXT + 2}
        stop = next((place for place, token in enumerate(tokens) if token in ends), num_tokens)
        return processor.decode(tokens[:stop])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(tmp_path_factory.mktemp("served"))


def test_a_chat_with_a_picture(chat: Chat) -> None:
    """Its steps in this process; the next test has them behind HTTP."""
    engine = LocalEngine(EngineConfig(model=str(chat.folder), arena_bytes=2**26, threads=1))
    engine.engine.load_adapter("tuned", str(chat.folder.parent / "tuned"))
    processor = InputProcessor.from_pretrained(str(chat.folder))
    prompt = processor.encode(processor.chat(QUESTION, 1), [picture()])
    for model, adapter in (("model", None), ("tuned", "tuned")):
        fields: dict[str, Any] = {"prompt_ids": prompt.prompt_ids, "vision": prompt.vision, "adapter": adapter}
        request = Request(request_id=model, sampling=SamplingParams(max_tokens=10), **fields)
        tokens = [token for output in engine.run([request])[model] for token in output.token_ids]
        wanted = chat.expected(model, 10)
        assert len(wanted) > 2 and processor.decode(tokens) == wanted


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_chat_with_a_picture_over_http(chat: Chat) -> None:
    with served(*chat.arguments) as on:
        chat.http_port = on.http_port
        for model in ("model", "tuned"):
            assert chat.ask(model, 10) == chat.expected(model, 10)
    assert on.log == ""


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    from vlora.models.hf_model import HFModel

    small.write_checkpoint(tmp_path / "model")
    ends = HFModel(load_model(EngineConfig(model=str(tmp_path / "model")))).eos_ids
    assert ends == {small.END_OF_TEXT, small.END_OF_TEXT + 1, small.END_OF_TEXT + 2}


@pytest.mark.parametrize("pickled", [False, True])
def test_check_reads_what_a_checkpoint_is(tmp_path: Path, pickled: bool) -> None:
    weights = small.write_checkpoint(tmp_path / "model", shards=3, pickled=pickled)
    found = check_model(EngineConfig(model=str(tmp_path / "model"), device="cpu"), adapter_rank=8)
    assert found.problems == () and found.num_files == 3
    assert (found.model_type, found.text_model, found.video) == ("qwen_vl", "qwen2", False)
    assert found.num_parameters == sum(tensor.numel() for tensor in weights.values())
    assert found.max_context == small.published_config()["seq_length"]


@pytest.mark.parametrize(
    ("dynamic_ntk", "logn", "longest"), [(False, True, 1024), (True, False, 1024), (False, False, 2048)]
)
def test_attention_that_depends_on_the_length_limits_it(
    tmp_path: Path, dynamic_ntk: bool, logn: bool, longest: int
) -> None:
    small.write_checkpoint(tmp_path / "model", use_dynamic_ntk=dynamic_ntk, use_logn_attn=logn)
    assert read_config(str(tmp_path / "model")).text_config.max_position_embeddings == longest


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "broken",
    [lambda content: b"", lambda content: content[:5000], lambda content: b"<html>" + content, None],
    ids=["empty", "truncated", "other", "missing"],
)
def test_a_broken_shard_is_named_in_one_line(
    tmp_path: Path, pickled: bool, broken: Callable[[bytes], bytes] | None
) -> None:
    small.write_checkpoint(tmp_path / "model", shards=2, pickled=pickled)
    (shard,) = (tmp_path / "model").glob("*-00002-of-*")
    content = shard.read_bytes()
    shard.unlink()
    if broken is not None:
        shard.write_bytes(broken(content))
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu")
    (problem,) = check_model(config, adapter_rank=8).problems
    assert problem.startswith(f"{shard.name}, a file of its weights, ") and "\n" not in problem
    assert not pickled or problem.endswith(
        ("is missing; download it", "it is truncated, or torch.save has not written it; download it again")
    )
    with pytest.raises(BadConfig) as raised:
        load_model(config)
    assert str(raised.value) == f"cannot load the weights of {config.model!r}: {problem}"


def without(section: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {name: value for name, value in config.items() if name != section}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("visual"), "without a 'visual' section in config.json is a text model, which has no image input"),
        (without("hidden_size"), "its config.json has no field 'hidden_size'"),
        (lambda config: {**config, "no_bias": False}, "Qwen-VL with no_bias = False is not supported; supported: True"),
        (lambda config: {**config, "rotary_pct": 0.25}, "rotary_pct = 0.25 is not supported; supported: 1.0"),
        (lambda config: {**config, "visual": {**config["visual"], "output_dim": 128}}, "visual.output_dim = 128"),
        (lambda config: {**config, "visual": [1]}, "its config.json is not valid"),
        (lambda config: {**config, "quantization_config": GPTQ}, "(quant_method 'gptq') is not supported"),
    ],
    ids=["text model", "no size", "biases", "partial rotary", "other width", "no object", "Int4"],
)
def test_other_models_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    small.write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(change(small.published_config())))
    with pytest.raises(VLoraError, match=re.escape(message)) as raised:
        read_config(str(tmp_path / "model"))
    assert isinstance(raised.value, BadConfig | UnsupportedModel) and "\n" not in str(raised.value)
