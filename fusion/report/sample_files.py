"""Test samples of a run, written as pictures with their labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import cv2

from fusion.data.samples import Splits
from fusion.plan.schema import Plan
from fusion.synthetic.sources import STREAMS
from fusion.training.objectives import answer_in_words

_MAX_SAMPLES = 100  # per domain


def write_test_data(folder: Path, plan: Plan, splits: Mapping[str, Splits]) -> None:
    """Write some test samples of every domain as PNG with their labels, and a video if its source has one.

    FOLDER/DOMAIN/labels.json: [{"frames": [file, ...], "question": text, "label": text}, ...].
    FOLDER/DOMAIN/stream.json: {"video": file, "labels": one per second, or null}.
    """
    for domain in plan.domains:
        own = splits[domain.name]
        here = folder / domain.name
        here.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, sample in enumerate(own.test[:_MAX_SAMPLES]):
            files = [f"{number:04d}-{place}.png" for place in range(len(sample.frames))]
            for file, frame in zip(files, sample.frames, strict=True):
                cv2.imwrite(str(here / file), cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
            question = sample.question or domain.question
            entries.append({"frames": files, "question": question, "label": answer_in_words(own, sample)})
        (here / "labels.json").write_text(json.dumps(entries, indent=1) + "\n")
        if domain.source in STREAMS:
            labels = STREAMS[domain.source](here / "stream.mp4", plan.seed)
            (here / "stream.json").write_text(json.dumps({"video": "stream.mp4", "labels": labels}) + "\n")
