"""Small data sets on disk, for tests of their readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from fusion.data.load import DomainData, load_domains
from fusion.plan.schema import DomainPlan, read_plan_file
from fusion.teachers import Teacher
from fusion.teachers.opening import open_teacher
from vlora.plan_files.errors import PlanErrors, PlanText


def picture(file: Path, seed: int, size: tuple[int, int] = (24, 32)) -> Path:
    """A picture [height, width] that differs from every other seed's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    assert cv2.imwrite(str(file), pixels)
    return file


def video(file: Path, seed: int, num_frames: int = 12, fps: int = 6) -> Path:
    """Frame i has a brightness of about 20 * i everywhere, which identifies the frame."""
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), fps, (48, 32))
    assert writer.isOpened()
    noise = np.random.default_rng(seed).integers(0, 4, (32, 48, 3)).astype(np.uint8)
    for place in range(num_frames):
        writer.write(noise + np.uint8(20 * place))
    writer.release()
    return file


def write_plan(folder: Path, *domains: str, more: str = "") -> Path:
    """A plan with these domains, each given as the lines after its name, question and threshold."""
    text = f"{more}domains:\n"
    for number, lines in enumerate(domains):
        text += f"  - name: domain{number}\n    question: what is it ?\n"
        text += "" if "threshold:" in lines else "    threshold: 0.5\n"
        text += "".join(f"    {line}\n" for line in lines.splitlines())
    if "confidence:" not in more:  # so few samples prove nothing
        text += "confidence: null\n"
    file = folder / "plan.yaml"
    file.write_text(text)
    return file


def open_plans_teacher(fields: dict[str, Any], task: str) -> Teacher:
    """The teacher of a domain. Raises BadPlan."""
    domain = DomainPlan(name="a", source="x", question="q", threshold=0.5, teacher=fields)  # type: ignore[arg-type]
    errors = PlanErrors(PlanText())
    assert domain.teacher is not None
    teacher = open_teacher(domain.teacher, task, errors)
    errors.raise_if_any()
    assert teacher is not None
    return teacher


def load_plan(file: Path) -> dict[str, DomainData]:
    """Load the data of a plan's domains. Raises BadPlan with all errors in it."""
    plan = read_plan_file(file)
    errors = PlanErrors(plan.text)
    data = load_domains(plan.plan, errors)
    errors.raise_if_any()
    return data
