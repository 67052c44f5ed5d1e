"""A plan with a head, words and a grid of detections on pictures of several sizes, and the accuracy of its served
adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from fusion.data.samples import Splits, Target
from fusion.data.targets import answer_in_words
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.made import load_plan
from tests.processors import write_checkpoint
from vlora.client import Client
from vlora.client.values import HeadResult

SIZES = ((32, 32), (24, 40), (48, 32))  # height and width: grids of image tokens with several shapes
COLORS = ("red", "green", "blue")
_NUM_PICTURES = 72
_SPLIT = "split: {validation: 0.25, test: 0.25}"


def write_mixed_plan(folder: Path, family: str, *, steps: int = 60, lora: str = "rank: 4") -> Path:
    """A plan with its base, a model of the family, and its data."""
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder / "base", family, *COLORS, "color", "find", "squares", "none")
    rows, content = [], _no_boxes()
    for number in range(_NUM_PICTURES):
        pixels, color = _tinted(number)
        _write(folder / "tinted" / f"{number}.png", pixels)
        rows.append(json.dumps({"image": f"{number}.png", "answer": COLORS[color]}))
        pixels, kind, box = _square(number)
        _write(folder / "squares" / f"{number}.png", pixels)
        height, width, _ = pixels.shape
        content["images"].append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
        content["annotations"].append({"id": number, "image_id": number, "category_id": kind, "bbox": box})
    (folder / "tinted.jsonl").write_text("\n".join(rows))
    (folder / "squares.json").write_text(json.dumps(content))
    tinted = f"{{format: questions, path: tinted.jsonl, images: tinted, {_SPLIT}}}"
    squares = f"{{format: coco, path: squares.json, images: squares, {_SPLIT}}}"
    (folder / "plan.yaml").write_text(
        f"""
base: base
confidence: null
training: {{steps: {steps}, batch_size: 12, bfloat16: false}}
lora: {{{lora}}}
domains:
  - {{name: colors, task: classification, threshold: 0.5, question: "what color is the picture ?", data: {tinted}}}
  - {{name: words, task: vqa, threshold: 0.5, question: "what is shown ?", data: {tinted}}}
  - {{name: squares, threshold: 0.1, question: "find squares ?", data: {squares}}}
"""
    )
    return folder / "plan.yaml"


def served_scores(client: Client, plan: Path, report: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """By domain: the metric of the server's answers on the plan's test samples, and the accuracy of words beside a
    head."""
    data = load_plan(plan)
    scores: dict[str, tuple[float, float | None]] = {}
    for domain in report["domains"]:
        name, adapter = domain["name"], domain["adapter"]
        splits, question = data[name].splits, plan_question(report, name)
        targets = [sample.target for sample in splits.test]
        pictures = [[cv2.imencode(".png", f[..., ::-1])[1].tobytes() for f in sample.frames] for sample in splits.test]
        objective = objective_of(splits, domain["metric"])
        words = []
        if domain["task"] != "detection":
            asked = [client.generate(question, shown, adapter, max_tokens=4, answer="words") for shown in pictures]
            words = [answer.text.strip() for answer in asked]
        if not objective.num_outputs:
            scores[name] = (objective.metric(words, targets), None)
            continue
        answers = [
            _value(client.ask_head(shown, adapter, name), s.frames[0].shape)
            for shown, s in zip(pictures, splits.test, strict=True)
        ]
        scores[name] = (objective.metric(answers, targets), _share_of_exact(splits, words) if words else None)
    return scores


def _share_of_exact(splits: Splits, words: Sequence[str]) -> float:
    return sum(answer_in_words(splits, one) == word for one, word in zip(splits.test, words, strict=True)) / len(words)


def plan_question(report: dict[str, Any], domain: str) -> str:
    return next(one["question"] for one in report["plan"]["domains"] if one["name"] == domain)


def _value(answer: HeadResult, shape: tuple[int, ...]) -> Target:
    if answer.task == "classification":
        assert answer.label_id is not None
        return answer.label_id
    height, width = shape[:2]
    return tuple(
        Box(b.label_id, b.left / width, b.top / height, b.right / width, b.bottom / height, b.score, b.image)
        for b in answer.boxes
    )


def _no_boxes() -> dict[str, Any]:
    kinds = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}]
    return {"images": [], "annotations": [], "categories": kinds}


def _tinted(number: int) -> tuple[np.ndarray, int]:
    """Noise with more of one colour, hardly visible in some."""
    rng = np.random.default_rng(number)
    pixels, color = rng.integers(0, 90, (*SIZES[number % 3], 3)), int(rng.integers(3))
    pixels[..., color] += int(rng.integers(0, 60))
    return pixels.astype(np.uint8), color


def _square(number: int) -> tuple[np.ndarray, int, list[int]]:
    """Noise with a red or blue square; the square's kind and [left, top, width, height]."""
    rng = np.random.default_rng(1000 + number)
    height, width = SIZES[number % 3]
    pixels, kind, side = rng.integers(0, 60, (height, width, 3)), int(rng.integers(2)), int(rng.integers(10, 16))
    top, left = int(rng.integers(height - side)), int(rng.integers(width - side))
    pixels[top : top + side, left : left + side, 2 * kind] += 180
    return pixels.astype(np.uint8), 1 + kind, [left, top, side, side]


def _write(file: Path, pixels: np.ndarray) -> None:
    file.parent.mkdir(exist_ok=True)
    assert cv2.imwrite(str(file), pixels[..., ::-1])
