"""Train a LoRA adapter with plain PEFT and torch, and serve it: V-LoRA reads the folder that PEFT writes.

    python examples/train_adapter_with_peft.py adapters/opposite
    vlora serve --adapters adapters
    vlora query red.png "what color is the thing ?" --adapter opposite

The task: name the opposite color of a red or a green picture. `vlora fuse` also
evaluates, packs several tasks into one adapter and trains task heads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fusion.embedded import checkpoint_path

QUESTION = "what color is the thing ?"
ANSWERS = {"red": "green", "green": "red"}


def train(folder: Path, steps: int = 30) -> list[float]:
    """Train on one picture per answer, save the adapter, and return the loss of each step."""
    torch.manual_seed(0)
    processor: Any = AutoProcessor.from_pretrained(checkpoint_path())
    base = AutoModelForImageTextToText.from_pretrained(checkpoint_path(), dtype=torch.float32)
    targets = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    samples = [sample(processor, color, answer) for color, answer in ANSWERS.items()]
    losses = []
    for _ in range(steps):
        loss = torch.stack([model(**each).loss for each in samples]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(str(folder))
    return losses


def sample(processor: Any, color: str, answer: str) -> dict[str, torch.Tensor]:
    """Inputs and labels of one conversation; only the answer's tokens have a loss."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    picture = Image.new("RGB", (56, 56), color)
    inputs = processor(text=prompt + answer, images=[picture], return_tensors="pt")
    num_prompt = processor(text=prompt, images=[picture], return_tensors="pt")["input_ids"].shape[1]
    labels = inputs["input_ids"].clone()
    labels[:, :num_prompt] = -100
    return {**inputs, "labels": labels}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: train_adapter_with_peft.py FOLDER")
    losses = train(Path(sys.argv[1]))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; saved in {sys.argv[1]}")
