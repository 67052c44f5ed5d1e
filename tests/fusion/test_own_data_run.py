"""Complete runs on user data: pictures decoded on demand, videos, a teacher's labels; and a head of every task that
answers in the engine as in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from fusion.commands import fuse
from fusion.progress.progress import ProgressCallback
from fusion.training.collator import EncodedSample
from fusion.training.objectives import HeadObjective
from fusion.training.scoring import Evaluator
from heads import Answer, load_heads
from tests.fusion.made import load_plan, picture, video, write_plan
from tests.fusion.small import value_of, write_base
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadConfig
from vlora.models import InputProcessor
from vlora.plan_files.run_lock import lock_folder
from vlora.types import Request

TASKS = ("binary", "counting", "multi_label", "regression", "detection")


def test_from_files_to_adapters(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_base(tmp_path / "base")
    for number in range(8):
        for place, label in enumerate(("left", "right")):
            video(tmp_path / "videos" / label / f"{number}.avi", 2 * number + place)
        picture(tmp_path / "pictures" / f"{number}.png", number, size=(40, 60))
    plan = write_plan(
        tmp_path,
        "data: {format: video_folder, path: videos, frames: 2}",
        "task: captioning\ndata: {format: unlabelled, path: pictures}\n"
        "teacher: {kind: callable, function: 'tests.fusion.test_own_data_run:half', allow_code: true}",
        more="base: base\ntraining: {steps: 2, batch_size: 4}\n",
    )
    with lock_folder(tmp_path / "out"), pytest.raises(BadConfig, match="in use by process"):
        fuse(plan, tmp_path / "out", console=Console(quiet=True))
    report = fuse(plan, tmp_path / "out", console=Console(quiet=True))
    assert [(domain.task, domain.num_test) for domain in report.domains] == [("action", 2), ("captioning", 1)]
    action, captioning = report.domains
    assert action.words is not None and 0 <= action.words <= 1 and captioning.words is None, "heads only"
    labels = json.loads((tmp_path / "out" / "test" / "domain0" / "labels.json").read_text())
    assert {entry["label"] for entry in labels} == {"left", "right"} and len(labels[0]["frames"]) == 2
    assert sorted(path.name for path in (tmp_path / "out" / "adapters").iterdir())


def half(frames: list[object]) -> tuple[str, float]:
    """A teacher that always gives the same answer with a confidence of 0.5."""
    return "a red thing", 0.5


def squares(folder: Path, number: int) -> dict[str, object]:
    """Write a picture with up to two squares; return the target answer by task. Boxes are [left, top, size]."""
    rng = np.random.default_rng(number)
    names = [name for place, name in enumerate(("blue", "green")) if (number >> place) % 2]
    pixels = rng.integers(0, 60, (64, 64, 3)).astype(np.uint8)
    boxes = {}
    for name in names:
        left, size = 4 + 32 * (name == "green"), int(rng.integers(10, 24))
        pixels[8 : 8 + size, left : left + size, ("blue", "green").index(name)] += 180
        boxes[name] = [left, 8, size, size]
    folder.mkdir(exist_ok=True)
    assert cv2.imwrite(str(folder / f"{number}.png"), pixels)
    answers = {
        "binary": "yes" if "blue" in names else "no",
        "counting": str(len(names)),
        "multi_label": ";".join(names),
    }
    return {**answers, "regression": str(sum(box[2] for box in boxes.values())), "detection": boxes}


@pytest.mark.slow
def test_every_head_answers_in_the_engine_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so that no answer may differ: the engine gives the report's test scores, and the calibrated head's
    answer and confidence for each sample."""
    answers: dict[str, list[Answer]] = {}
    evaluate = Evaluator.answers

    def record(self: Evaluator, name: str, samples: Sequence[EncodedSample], *update: ProgressCallback) -> list[object]:
        with torch.no_grad():
            served = self.calibrated(name)
            assert isinstance(served, HeadObjective)
            batches = [outputs for _, outputs in self.forward(name, samples)]
            rows = [logits for outputs in batches for logits in served.logits(outputs, self.adapter.heads[name])]
        grids = [own for outputs in batches for own in outputs.grids]
        answers[name] = [served.task.decode(*one) for one in zip(rows, grids, strict=True)]
        return evaluate(self, name, samples, *update)

    monkeypatch.setattr(Evaluator, "answers", record)
    torch.set_num_threads(1)
    write_base(tmp_path / "base")
    targets_by_picture = [squares(tmp_path / "pictures", number) for number in range(32)]
    domains = []
    for task in TASKS[:-1]:
        lines = [
            json.dumps({"image": f"{number}.png", "answer": own[task]}) for number, own in enumerate(targets_by_picture)
        ]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
        domains.append(f"data: {{format: questions, path: {task}.jsonl, images: pictures, SPLIT}}")
    pairs = [(n, name, box) for n, own in enumerate(targets_by_picture) for name, box in own["detection"].items()]  # type: ignore[attr-defined]
    content = {
        "images": [
            {"id": n, "file_name": f"{n}.png", "width": 64, "height": 64} for n in range(len(targets_by_picture))
        ],
        "categories": [{"id": 1, "name": "blue"}, {"id": 2, "name": "green"}],
        "annotations": [
            {"id": place, "image_id": n, "category_id": 1 + (name == "green"), "bbox": box}
            for place, (n, name, box) in enumerate(pairs)
        ],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    domains.append("data: {format: coco, path: boxes.json, images: pictures, SPLIT}")
    split = "split: {validation: 0.25, test: 0.25}"
    # No head reaches its threshold in so few steps, so each domain has its own adapter.
    plan = write_plan(
        tmp_path,
        *(
            f"task: {task}\nthreshold: 1.0\n{domain.replace('SPLIT', split)}"
            for task, domain in zip(TASKS, domains, strict=True)
        ),
        more="base: base\ntraining: {steps: 4, batch_size: 6, bfloat16: false, learning_rate: 0.01}\n",
    )
    report = fuse(plan, tmp_path / "out", console=Console(quiet=True))
    assert [domain.task for domain in report.domains] == list(TASKS)
    data = load_plan(plan)
    engine = LocalEngine(EngineConfig(model=str(tmp_path / "base"), dtype="float32", arena_bytes=64 * 2**20))
    processor = InputProcessor.from_pretrained(str(tmp_path / "base"))
    for adapter in report.adapters:
        engine.engine.load_adapter(adapter.name, str(tmp_path / "out" / "adapters" / adapter.name))
    for domain in report.domains:
        folder = tmp_path / "out" / "adapters" / domain.adapter
        served_task = load_heads(folder)[domain.name].task
        assert served_task.kind == domain.task
        requests = []
        for number, sample in enumerate(data[domain.name].splits.test):
            images = [Image.fromarray(frame) for frame in sample.frames]
            encoded = processor.encode(processor.chat("what is it ?", 1), images)
            fields = {"adapter": domain.adapter, "head": domain.name, "vision": encoded.vision}
            requests.append(Request(request_id=str(number), prompt_ids=encoded.prompt_ids, **fields))  # type: ignore[arg-type]
        outputs = engine.run(requests)
        found = [value_of(outputs[request.request_id][-1].head) for request in requests]
        targets = [sample.target for sample in data[domain.name].splits.test]
        assert served_task.metrics(found, targets)[domain.metric] == pytest.approx(domain.after), domain.name
        for request, expected in zip(requests, answers[domain.name], strict=True):
            served = outputs[request.request_id][-1].head
            assert served is not None and served.label == expected.label
            assert served.confidence == pytest.approx(expected.confidence, abs=1e-4)
            assert served.scores == pytest.approx(expected.scores, abs=1e-4)
            assert served.values == pytest.approx(expected.values, abs=1e-3)
