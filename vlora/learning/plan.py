"""The plan of `vlora serve --learn`: a YAML file with the adapters that learn while they serve."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from vlora.plan_files.errors import PlanErrors
from vlora.plan_files.fields import AdapterName, Number, PlanModel, PlanPath, Whole, check_names
from vlora.plan_files.reading import read_model
from vlora.training.plan import TrainingSettings, check_file
from vlora.training.records import Record, read_records

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"


class LearningSettings(PlanModel):
    """One adapter.

    Attributes:
        name: Of the adapter. Its answers are kept from now on.
        data: Records of the operator that each training uses beside the live ones: a JSONL file or a folder.
        trusted: Records of the operator that decide promotions and are never trained on.
        question: For records of both without one.
        train_after: Corrections after which a training begins; None: only by hand.
        held_out: Share of the live records that decide promotions and are never trained on.
        uncorrected_are_right: Whether held-out answers without a correction count as right in an evaluation. Without
            them only corrected answers count, most of which the present version has wrong.
        correct_within_s: Time after which an answer is not expected to be corrected any more.
        max_records: Corrected answers on disk at most, and as many without a correction.
        max_evaluated: Live records, and trusted ones, that an evaluation asks at most: the latest, and the first.
        confidence: Of the bounds that decide.
        max_trusted_loss: Share of the trusted records that a promotion may lose.
        max_share: Share of the records by which a training, a promotion or a rollback is decided that one tenant
            may have; admin tokens are not bounded.
    """

    name: AdapterName = Field(pattern=NAME)
    training: TrainingSettings
    data: PlanPath | None = None
    trusted: PlanPath | None = None
    question: str | None = Field(None, min_length=1)
    train_after: Whole | None = Field(100, ge=1)
    held_out: Number = Field(0.3, gt=0, lt=1)
    uncorrected_are_right: bool = True
    correct_within_s: Number = Field(300, ge=0)
    max_records: Whole = Field(10_000, ge=1, le=1_000_000)
    max_bytes: Whole = Field(2**30, ge=1)
    max_evaluated: Whole = Field(500, ge=1, le=100_000)
    confidence: Number = Field(0.95, gt=0.5, lt=1)
    max_trusted_loss: Number = Field(0.05, ge=0, lt=1)
    max_share: Number = Field(0.5, gt=0, le=1)
    max_versions: Whole = Field(8, ge=2, le=1000)


class LearningPlan(PlanModel):
    """folder: for records, versions, trails and trainings, one subfolder per adapter."""

    folder: PlanPath
    adapters: list[LearningSettings] = Field(min_length=1, max_length=64)

    @field_validator("adapters")
    @classmethod
    def _unique(cls, adapters: list[LearningSettings]) -> list[LearningSettings]:
        check_names((one.name for one in adapters), "adapters")
        return adapters


class Item(NamedTuple):
    """A question with its right answer. image: a file. number: of the live record that has the picture instead."""

    question: str
    label: str
    image: Path | None = None
    number: int | None = None


class LearningEntry(NamedTuple):
    """One adapter of a plan: its settings, and the operator's records."""

    settings: LearningSettings
    data: tuple[Record, ...]
    trusted: tuple[Item, ...]


def read_learning_plan(file: Path | str) -> tuple[Path, list[LearningEntry]]:
    """The plan's folder, and its adapters.

    Raises:
        BadPlan: The plan or its data cannot be used; with file, line and field of every error.
    """
    check_file(file)
    plan, text = read_model(file, LearningPlan, needed="adapters")
    errors = PlanErrors(text)
    found = []
    for place, one in enumerate(plan.adapters):
        part = errors.inside("adapters", place)
        data = _read(one.data, one.question, part.inside("data", whole=True))
        trusted = _read(one.trusted, one.question, part.inside("trusted", whole=True))
        items = tuple(Item(each.question, each.answer, each.image) for each in trusted[: one.max_evaluated])
        found.append(LearningEntry(one, data, items))
    errors.raise_if_any()
    return plan.folder, found


def _read(path: Path | None, question: str | None, errors: PlanErrors) -> tuple[Record, ...]:
    """All records; those with a `split` of test are left out."""
    if path is None:
        return ()
    found = read_records(path, question, held_out=0, seed=0, errors=errors)
    return (*found.train, *found.held_out)
