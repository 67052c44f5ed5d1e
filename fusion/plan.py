"""The plan file: which domains, from what data, with which promise. Mistakes are told with file, line and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from heads import TASKS
from vlora.errors import BadPlan

Location = tuple[int | str, ...]


class _Strict(BaseModel):
    # A misspelt field must not silently mean its default.
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraPlan(_Strict):
    """Adapter settings: rank and alpha of LoRA on every linear layer of the language model."""

    rank: int = Field(8, ge=1, le=256)
    alpha: int = Field(16, ge=1)


class TrainingPlan(_Strict):
    """One training per domain. batch_size counts pictures: a clip of four frames takes the place of four.

    rehearsal: share of each batch drawn from the domains already in the adapter.
    """

    steps: int = Field(120, ge=1)
    batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    rehearsal: float = Field(0.5, ge=0, lt=1)


class DomainPlan(_Strict):
    """One task. source: a built-in name, or a folder (relative to the plan file).

    The promise is either threshold, the validation accuracy it must keep as a share of 1, or below_single, how far it may
    fall below what it reaches in an adapter of its own. num_frames: pictures per question; built-in sources know theirs.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$")
    task: str = "classification"
    source: str = Field(min_length=1)
    question: str = Field(min_length=1)
    metric: Literal["accuracy"] = "accuracy"
    threshold: float | None = Field(None, gt=0, le=1)
    below_single: float | None = Field(None, ge=0, lt=1)
    num_frames: int | None = Field(None, ge=1)


class Plan(_Strict):
    """A whole run. base: "embedded", a folder (relative to the plan file), or a hub name."""

    base: str = Field("embedded", min_length=1)
    seed: int = Field(0, ge=0)
    lora: LoraPlan = LoraPlan()
    training: TrainingPlan = TrainingPlan()
    domains: tuple[DomainPlan, ...] = Field(min_length=1)

    _file: Path | None = PrivateAttr(None)
    _tree: yaml.Node | None = PrivateAttr(None)

    def mistake(self, location: Location, message: str) -> BadPlan:
        """The error for something wrong at a place of the plan, found after reading it (data that is not there, say)."""
        return BadPlan(_located(self._file, self._tree, location, message))

    def resolve(self, path: str) -> str:
        """A path as the plan's author meant it: relative to the plan file when there is such a thing, else as it stands."""
        beside = (self._file.parent if self._file is not None else Path()) / Path(path).expanduser()
        return str(beside) if beside.exists() else path


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan file. Raises BadPlan naming file, line and field of every mistake."""
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
    mistakes = _twice(path, tree, ())
    try:
        plan = Plan.model_validate(content)
    except ValidationError as error:
        mistakes += [_located(path, tree, mistake["loc"], _say(mistake)) for mistake in error.errors()]
    else:
        plan._file, plan._tree = path, tree
        mistakes += [_located(path, tree, location, message) for location, message in _contradictions(plan)]
    if mistakes:
        raise BadPlan("\n".join(mistakes))
    return plan


def _contradictions(plan: Plan) -> list[tuple[Location, str]]:
    """What no single field can tell is wrong."""
    found: list[tuple[Location, str]] = []
    seen: set[str] = set()
    for index, domain in enumerate(plan.domains):
        here = ("domains", index)
        if domain.name in seen:
            found.append(((*here, "name"), f"two domains are named {domain.name!r}; names must differ"))
        seen.add(domain.name)
        if domain.task not in TASKS:
            found.append(((*here, "task"), f"unknown task, got {domain.task!r}; known: {', '.join(sorted(TASKS))}"))
        if domain.threshold is None and domain.below_single is None:
            found.append(((*here, "threshold"), "is missing; give threshold (0 to 1) or below_single (0 to 1)"))
        if domain.threshold is not None and domain.below_single is not None:
            found.append(((*here, "below_single"), "threshold is given too; a domain makes one promise, drop one of them"))
    return found


def _twice(path: Path, node: yaml.Node | None, location: Location) -> list[str]:
    """Fields written twice in one mapping; YAML would silently keep the last."""
    found: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                where = _field((*location, name))
                found.append(f"{path}, line {key.start_mark.line + 1}, field `{where}`: is given twice")
            seen.add(name)
            found += _twice(path, value, (*location, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            found += _twice(path, item, (*location, index))
    return found


def _say(mistake: Any) -> str:
    if mistake["type"] == "extra_forbidden":
        return "no such field; check its spelling"
    if mistake["type"] == "missing":
        return "is missing"
    given = mistake.get("input")
    return f"{mistake['msg']}, got {given!r}" if isinstance(given, str | int | float | bool) else str(mistake["msg"])


def _located(file: Path | None, tree: yaml.Node | None, location: Location, message: str) -> str:
    where = f"{file}, line {_line(tree, location)}, " if file is not None else ""
    return f"{where}field `{_field(location)}`: {message}"


def _field(location: Location) -> str:
    out = ""
    for step in location:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out or "plan"


def _line(node: yaml.Node | None, location: Location) -> int:
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
