"""Evaluation of a checkpoint: exact match of generated text per skill, on scenes that were not used in training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from fusion.embedded import world
from vlora.models.pretrained import from_pretrained

_BATCH = 64
MAX_NEW_TOKENS = 16


class Accuracy(NamedTuple):
    """Share of answers that match word for word, and number of questions."""

    share: float
    num_questions: int


def as_pixels(frames: np.ndarray) -> torch.Tensor:
    """Convert uint8 [n, 96, 96, 3] as the image processor does for this size: float [n, 3, 96, 96], -1 to 1."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


@torch.no_grad()
def exam_scenes(seed: int, num_scenes: int) -> list[world.Scene]:
    """The pictures that the exam asks about, and a quarter as many clips."""
    rng = np.random.default_rng(seed)
    stills = [world.still_scene(rng) for _ in range(num_scenes)]
    return stills + [world.clip_scene(rng) for _ in range(num_scenes // 4)]


def accuracy_by_skill(
    checkpoint: Path | str, *, num_scenes: int, seed: int, blank: bool = False
) -> dict[str, Accuracy]:
    """Evaluate every question of `num_scenes` pictures and a quarter as many clips. blank: use grey pictures instead,
    as a control."""
    processor = from_pretrained(AutoProcessor, checkpoint)
    model = from_pretrained(AutoModelForImageTextToText, checkpoint, dtype=torch.float32).eval()
    by_length: dict[int, list[tuple[world.Scene, world.Question]]] = defaultdict(list)
    for scene in exam_scenes(seed, num_scenes):
        by_length[len(scene.frames)] += [(scene, question) for question in scene.questions]
    right: dict[str, list[bool]] = defaultdict(list)
    for pairs in by_length.values():
        for start in range(0, len(pairs), _BATCH):
            part = pairs[start : start + _BATCH]
            answers = _answer(model, processor, part, blank)
            for (_, question), answer in zip(part, answers, strict=True):
                right[question.skill].append(answer == question.answer)
    result = {skill: Accuracy(float(np.mean(hits)), len(hits)) for skill, hits in sorted(right.items())}
    every = [hit for hits in right.values() for hit in hits]
    return {**result, "overall": Accuracy(float(np.mean(every)), len(every))}


def _answer(model: Any, processor: Any, part: Sequence[tuple[world.Scene, world.Question]], blank: bool) -> list[str]:
    frames = np.concatenate([scene.frames for scene, _ in part])
    prompts = []
    for scene, question in part:
        content = [{"type": "image"}] * len(scene.frames) + [{"type": "text", "text": question.text}]
        prompts.append(
            processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        )
    text = [prompt.replace("<image>", "<image>" * processor_tokens(processor)) for prompt in prompts]
    encoded = processor.tokenizer(
        text, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    pixels = as_pixels(np.full_like(frames, 128) if blank else frames)
    out = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        pixel_values=pixels,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    return processor.batch_decode(out[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def processor_tokens(processor: Any) -> int:
    size = processor.image_processor.size
    return (size["height"] // processor.patch_size) * (size["width"] // processor.patch_size)


def format_accuracy(accuracy: Mapping[str, Accuracy]) -> str:
    return "\n".join(
        f"{skill:<18} {100 * value.share:5.1f} %  of {value.num_questions}" for skill, value in accuracy.items()
    )
