"""Requests of many kinds to the embedded model with its own adapters, for tests that compare whole answers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

from fusion.embedded import checkpoint_path
from heads import HeadSpec, TaskHead, save_heads
from vlora.config import EngineConfig
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor
from vlora.types import Request, RequestOutput, SamplingParams, TokenScore

ADAPTERS = ("north", "south", "east")
HEAD = "kind"
NUM_TOKENS = 48

_COLOUR = "(red|green|blue|yellow|purple|orange|cyan|white)"
GRAMMAR = f"start: / ?{_COLOUR}( {_COLOUR}){{23}}/"


def config(**settings: Any) -> EngineConfig:
    fields = {"model": checkpoint_path(), "dtype": "float32", "threads": 1, "arena_bytes": 64 << 20, "block_size": 8}
    return EngineConfig(**{**fields, **settings})


def write_adapters(folder: Path) -> dict[str, str]:
    """Write `ADAPTERS`, of rank 8 with random factors, each with a head of one frame. Returns their folders."""
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        model = load_model(config())
        linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        settings = LoraConfig(r=8, lora_alpha=8, target_modules=linears, init_lora_weights=False)
        get_peft_model(model, settings).save_pretrained(str(folder / name))
        hidden = model.config.text_config.hidden_size
        spec = HeadSpec(
            name=HEAD,
            task="classification",
            labels=("disc", "board", "rings"),
            prompt="what shape is shown ?",
            num_frames=1,
            hidden_size=hidden,
        )
        save_heads(folder / name, {HEAD: TaskHead(spec, torch.randn(3, hidden), torch.zeros(3))})
    return {name: str(folder / name) for name in ADAPTERS}


def text(name: str, **fields: Any) -> Request:
    """A request with a random prompt. Its fields are those of `Request` and of `SamplingParams`."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    own = {field: fields.pop(field) for field in tuple(fields) if field in Request.__struct_fields__}
    sampling = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": "grammar" not in fields, **fields})
    ids = torch.randint(5, 470, (20,), generator=generator).tolist()
    return Request(request_id=name, **{"prompt_ids": tuple(ids), "sampling": sampling, **own})


def picture(name: str, **fields: Any) -> Request:
    """As `text`, with an image."""
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    processor = InputProcessor.from_pretrained(checkpoint_path())
    processed = processor.process_images([Image.fromarray(pixels)])
    encoded = processor.encode_processed(processor.ask("what shape is shown ?", ["image"]), processed)
    return text(name, prompt_ids=encoded.prompt_ids, vision=encoded.vision, **fields)


def cases() -> dict[str, Request]:
    """One request of each kind, by its id."""
    prompt = text("choices").prompt_ids
    made = (
        text("greedy"),
        text("adapted", adapter="north"),
        text("composed", adapter="0.5*north+south"),
        text("drawn", temperature=1.0, seed=7),
        text("drawn by id", temperature=1.0, top_p=0.9, adapter="east"),
        # Several answers to one prompt, as the front end makes them.
        *(text(f"choice {number}", prompt_ids=prompt, temperature=1.3, top_k=50) for number in range(3)),
        text("scored", logprobs=2, temperature=0.7),
        text("penalized", repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, min_tokens=30),
        text("in a grammar", grammar=GRAMMAR, temperature=1.0, seed=5, max_tokens=200),
        text("whole", whole=True, adapter="south", temperature=0.5),
        picture("pictured", adapter="south", temperature=0.8, seed=3),
    )
    return {request.request_id: request for request in made}


def head() -> Request:
    return msgspec.structs.replace(picture("head", adapter="north"), head=HEAD, sampling=SamplingParams())


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    assert outputs[-1].error is None, outputs[-1].error
    return tuple(token for output in outputs for token in output.token_ids)


def scores_of(outputs: Sequence[RequestOutput]) -> list[TokenScore]:
    return [score for output in outputs for score in output.scores]
