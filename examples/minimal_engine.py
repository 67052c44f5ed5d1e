"""The engine alone: the packaged model, one LoRA adapter, three requests, no server and no other process.

    python examples/minimal_engine.py

Prints the mode of every step and each answer. PEFT makes the adapter, with random factors: its answers differ from the
base model's and are meaningless.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText

from fusion.embedded import checkpoint_path
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.models.processing import InputProcessor
from vlora.types import Request, SamplingParams


def write_adapter(folder: Path) -> None:
    """Save a random LoRA adapter of rank 4 on the attention projections, in PEFT's format."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint_path())
    targets = r".*language_model.*\.(q|k|v|o)_proj"
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False))
    peft_model.save_pretrained(str(folder))


def run() -> dict[str, str]:
    """Answer one question with the base model and with the adapter, and return the answers by request id."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder))
        engine = Engine(EngineConfig(model=checkpoint_path(), arena_bytes=64 * 2**20))
        engine.register_adapters({"random": folder})

        processor = InputProcessor.from_pretrained(checkpoint_path())
        picture = Image.new("RGB", (56, 56), "red")
        encoded = processor.encode(processor.chat("what color is the thing ?", num_images=1), [picture])
        for request_id, adapter in (("base", None), ("adapted", "random"), ("adapted again", "random")):
            engine.add(
                Request(
                    request_id=request_id,
                    adapter=adapter,
                    prompt_ids=encoded.prompt_ids,
                    vision=encoded.vision,
                    sampling=SamplingParams(max_tokens=8),
                )
            )

        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                assert output.error is None, output.error
        for step in engine.snapshot().steps:
            work = (
                f"{step.num_requests} requests, {step.num_tokens} tokens" if step.num_requests else "part of a picture"
            )
            print(f"step {step.number}: {step.mode}, {work}")
        engine.close()
    return {request_id: processor.decode(ids) for request_id, ids in tokens.items()}


if __name__ == "__main__":
    for request_id, answer in run().items():
        print(f"{request_id}: {answer}")
