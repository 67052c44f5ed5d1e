"""The plan file: which domains, from what data, with which promise. Mistakes are told with file, line and field."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vlora.errors import BadPlan


class _Strict(BaseModel):
    # A misspelt field must not silently mean its default.
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraPlan(_Strict):
    """Adapter settings: rank and alpha of LoRA on every linear layer of the language model."""

    rank: int = Field(8, ge=1, le=256)
    alpha: int = Field(16, ge=1)


class TrainingPlan(_Strict):
    """One training per domain, of `steps` steps, or as many of them as fit into `seconds` of processor time.

    rehearsal: share of each batch drawn from the domains already in the adapter.
    """

    steps: int = Field(120, ge=1)
    seconds: float | None = Field(None, gt=0)
    batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    rehearsal: float = Field(0.5, ge=0, lt=1)


class DomainPlan(_Strict):
    """One domain. source: a built-in name or a folder. task: None for what the source is for. threshold: validation
    accuracy it must keep, as a share of 1."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$")
    task: Literal["classification", "action", "vqa", "captioning", "referring"] | None = None
    source: str
    question: str = Field(min_length=1)
    metric: Literal["accuracy"] = "accuracy"
    threshold: float = Field(gt=0, le=1)


class Plan(_Strict):
    """A whole run. base: "embedded", a folder, or a hub name."""

    base: str = "embedded"
    seed: int = Field(0, ge=0)
    lora: LoraPlan = LoraPlan()
    training: TrainingPlan = TrainingPlan()
    domains: tuple[DomainPlan, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Plan:
        seen: set[str] = set()
        for domain in self.domains:
            if domain.name in seen:
                raise ValueError(f"two domains are named {domain.name!r}; names must differ")
            seen.add(domain.name)
        return self


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan file. Raises BadPlan naming file, line and field."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPlan(f"{path}: cannot be read: {error}") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        raise BadPlan(f"{path}, line {line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise BadPlan(f"{path}, line 1: a plan is a mapping with the field `domains`, found {type(content).__name__}")
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        mistakes = [
            f"{path}, line {_line(tree, mistake['loc'])}, field `{_field(mistake['loc'])}`: {_say(mistake)}"
            for mistake in error.errors()
        ]
        raise BadPlan("\n".join(mistakes)) from error


def _say(mistake: object) -> str:
    assert isinstance(mistake, dict)
    if mistake["type"] == "extra_forbidden":
        return "no such field; check its spelling"
    if mistake["type"] == "missing":
        return "is missing"
    message = str(mistake["msg"]).removeprefix("Value error, ")
    given = mistake.get("input")
    return f"{message}, got {given!r}" if isinstance(given, str | int | float | bool) else message


def _field(location: tuple[int | str, ...]) -> str:
    out = ""
    for step in location:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out or "plan"


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """The line of the deepest part of `location` that is in the file."""
    line = 1 if node is None else node.start_mark.line + 1
    for step in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
            if found is None:
                break
            key, node = found
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line
