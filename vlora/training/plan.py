"""The plan of `vlora serve --train` and `vlora train submit`: a YAML file with the adapters to train."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors
from vlora.plan_files.fields import AdapterName, Number, PlanModel, PlanPath, Whole, check_names
from vlora.plan_files.reading import read_model
from vlora.training.records import Records, read_records, unreadable

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class TrainingSettings(PlanModel):
    """How an adapter is trained.

    Attributes:
        micro_batch_tokens: Tokens of a micro-step, at most, but one record at least.
        rank, alpha, rslora, targets, learning_rate, weight_decay, max_norm, seed: See `LoraSettings`. The seed also
            sets the order of the records.
    """

    steps: Whole = Field(ge=1, le=1_000_000)
    batch: Whole = Field(8, ge=1, le=65_536)
    micro_batch_tokens: Whole = Field(256, ge=1, le=65_536)
    rank: Whole = Field(8, ge=1)
    alpha: Number = Field(16.0, gt=0, le=1e6)
    rslora: bool = False
    targets: tuple[str, ...] = Field(("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1)
    learning_rate: Number = Field(2e-4, gt=0, le=100)
    weight_decay: Number = Field(0.0, ge=0, le=100)
    max_norm: Number | None = Field(None, gt=0, le=1e30)
    seed: Whole = 0


class TrainingPlan(TrainingSettings):
    """One adapter.

    Attributes:
        name: The adapter is registered under this name when the training ends.
        data: A JSONL file (see `read_records`), or a folder with `questions.jsonl`.
        question: For records without one.
        held_out: Share of the records for evaluation, for data without a `split`.
        start: An adapter of a training with the same rank, scale and targets, from which this one begins.
        register_adapter: Whether the finished adapter serves under its name.
        bad_records: Refuse: a record that cannot be used is an error. Skip: it is set aside, unless more than half are.
    """

    name: AdapterName = Field(pattern=NAME)
    data: PlanPath
    question: str | None = Field(None, min_length=1)
    held_out: Number = Field(0.1, ge=0, lt=1)
    start: PlanPath | None = None
    register_adapter: bool = True
    bad_records: Literal["refuse", "skip"] = "refuse"


class Plan(PlanModel):
    """folder: for checkpoints and adapters, one subfolder per training."""

    folder: PlanPath
    trainings: list[TrainingPlan] = Field(min_length=1, max_length=64)

    @field_validator("trainings")
    @classmethod
    def _unique(cls, trainings: list[TrainingPlan]) -> list[TrainingPlan]:
        check_names((one.name for one in trainings), "trainings")
        return trainings


def check_file(file: Path | str) -> None:
    """Raises BadPlan for a plan of a server that must not be opened (`unreadable`)."""
    try:
        problem = unreadable(Path(file))
    except ValueError as error:  # of the path's text
        raise BadPlan(f"{str(file)!r} is not a path: {error}") from error
    if problem:
        raise BadPlan(f"{file}: {problem}")


def read_plan(file: Path | str) -> tuple[Path, list[tuple[TrainingPlan, Records]]]:
    """The plan's folder, and its trainings with their records.

    Raises:
        BadPlan: The plan or its data cannot be used; with file, line and field of every error.
    """
    check_file(file)
    plan, text = read_model(file, Plan, needed="trainings")
    errors = PlanErrors(text)
    found = []
    for place, one in enumerate(plan.trainings):
        part = errors.inside("trainings", place)
        skips = one.bad_records == "skip"
        records = read_records(one.data, one.question, held_out=one.held_out, seed=one.seed, errors=part, skips=skips)
        if not part and not records.train:
            part.add(f"{one.data} has no record to train on", "data")
        found.append((one, records))
    errors.raise_if_any()
    return plan.folder, found
