"""docs/plan.md: its example is valid, and its tables match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from fusion.plan.data_formats import DataPlan
from fusion.plan.plan_file import read_plan
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.plan.tasks import METRICS, TASKS
from fusion.plan.teacher_kinds import TeacherPlan

GUIDE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


def test_the_example_can_be_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "plan.yaml").write_text(example)
    assert [domain.name for domain in read_plan(tmp_path / "plan.yaml").domains] == ["signs", "lots", "gates"]


def test_defaults_are_told_as_they_are() -> None:
    told: dict[tuple[str, str], str] = {}
    for names, defaults in re.findall(r"^\| (`[\w.`, ]+`) \| ([^|]+) \|", GUIDE, re.MULTILINE):
        section = ""
        for name, default in zip(re.findall(r"`([\w.]+)`", names), defaults.split(", "), strict=False):
            *before, field = name.split(".")
            section = section if before == [""] else ".".join(before)
            told[section, field] = default.strip(" `")
    for section, model in (("", Plan), ("lora", LoraPlan), ("training", TrainingPlan)):
        for name, about in model.model_fields.items():
            if name in ("lora", "training", "domains"):
                continue
            default = about.default[0] if isinstance(about.default, tuple) else about.default
            assert told[section, name] in (("none", "all") if default is None else (str(default).lower(),)), name


def test_every_field_task_format_and_teacher_is_told() -> None:
    for model in (Plan, LoraPlan, TrainingPlan, DomainPlan):
        assert issubclass(model, BaseModel)
        for field in model.model_fields:
            assert re.search(rf"`[\w.\[\]]*{field}\b", GUIDE), field
    for union, key in ((DataPlan, "format"), (TeacherPlan, "kind")):
        for form in get_args(get_args(union)[0]):
            (name,) = get_args(form.model_fields[key].annotation)
            assert f"`{name}`" in GUIDE, name
            for field in set(form.model_fields) - {key, "allow_code"}:
                assert f"`{field}" in GUIDE or f"{field}:" in GUIDE, f"{name}.{field}"
    for task in TASKS:
        assert f"`{task}`" in GUIDE
    for task, metrics in METRICS.items():
        row = next(line for line in GUIDE.splitlines() if line.startswith("| `") and f"`{task}`" in line)
        assert all(metric in row for metric in metrics if metric != "accuracy" or "words" not in row), task
