"""The plan: settings of adapters and training, and the domains with their data and thresholds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fusion.plan.data_formats import DataPlan, Unlabelled
from fusion.plan.teacher_kinds import TeacherPlan
from vlora.config import Quantize
from vlora.plan_files.errors import PlanText
from vlora.plan_files.fields import AdapterName, Number, PlanModel, Whole
from vlora.plan_files.reading import read_model

HeadKind = Literal["classification", "binary", "counting", "action", "multi_label", "regression", "detection"]
"""Of `heads.TASKS`, which would load torch. Each is the task of a domain too."""
Task = Literal[HeadKind, "vqa", "captioning", "referring"]
Metric = Literal["accuracy", "f1", "map", "within_one", "within", "mae", "exact_match", "token_f1", "overlap"]
WORDS = "words"
Head = Literal[HeadKind, "words"]

TASKS: tuple[str, ...] = get_args(Task)

# The first is the default. All range from 0 to 1, higher is better, so a threshold can be set on each.
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1"),
    "binary": ("accuracy", "f1"),
    "counting": ("accuracy", "within_one"),
    "action": ("accuracy", "f1"),
    "multi_label": ("f1", "accuracy"),
    "regression": ("within",),
    "detection": ("f1", "map"),
    "vqa": ("exact_match", "token_f1", "accuracy"),
    "captioning": ("exact_match", "token_f1", "accuracy"),
    "referring": ("exact_match", "token_f1", "accuracy", "overlap"),
}
# Tasks that are answered by one of several labels, by a head or in words.
ONE_LABEL = frozenset({"classification", "binary", "counting", "action"})
# Minimum number of labels of a task's head; tasks that are answered in words have none.
MIN_LABELS = {kind: 2 if kind in ONE_LABEL else 1 for kind in get_args(HeadKind)}
# Metrics that are means over samples of a value from 0 to 1. The others are computed over all samples together.
MEANS = frozenset({"accuracy", "within_one", "within", "exact_match", "token_f1", "overlap"})
METRIC_DESCRIPTIONS = {
    "accuracy": "share of samples answered correctly",
    "f1": "F1",
    "map": "mean average precision",
    "within_one": "share of counts that are exact or off by one",
    "within": "share of numbers within a quarter of their spread in the training data",
    "exact_match": "share of answers that match word for word",
    "token_f1": "F1 of the answers' words",
    "overlap": "share of answered boxes that overlap the correct one by at least a half",
}
# The first is the default. A task without a head is answered in words by the language model.
HEADS: dict[str, tuple[str, ...]] = {
    **{kind: (kind, WORDS) if kind in ONE_LABEL else (kind,) for kind in get_args(HeadKind)},
    **{task: (WORDS,) for task in ("vqa", "captioning", "referring")},
}
READ_IMAGES = frozenset({"detection"})  # tasks with a head that reads every image token
# Such a head is small and trains by itself, since a LoRA of the language model does not change what it reads: with more
# steps and samples per step than the plan's, at a fraction of their cost.
HEAD_STEPS, HEAD_SAMPLES = 5, 4


def trains_by_itself(task: str, *, vision: bool) -> bool:
    """Whether domains of this task take no part in the training of the LoRA.

    Args:
        vision: whether the LoRA adapts the vision side, which computes the features.
    """
    return task in READ_IMAGES and not vision


def head_training(steps: int, batch_size: int) -> str:
    """Steps and samples of such a head's training, by those of the plan."""
    return f"{HEAD_STEPS * steps} steps of {HEAD_SAMPLES * batch_size} samples"


_MOST_ORDERS = 64
Packer = Literal["guided", "naive", "first_fit", "jointly"]
Order = Literal["given", "random", "similarity", "hardest_first"]


Name = Annotated[AdapterName, Field(max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
"""A name of folders, and of adapters or domains in requests."""


class LoraPlan(PlanModel):
    """Adapter settings.

    rslora: scale by alpha / sqrt(rank) instead of alpha / rank. targets: the linear layers of the language model that
    get a delta, by the last part of their names (q_proj, ...); None for all. vision: also adapt all linear layers of
    the vision tower and the projector. blocks: number of blocks of block-diagonal factors (BD-LoRA), one per serving
    rank; each block is a LoRA of rank / blocks and is scaled as such. activated: the adapter applies from its
    invocation on (aLoRA); the tokens before are the base model's, and all such adapters share their KV. invocation:
    words that every prompt contains; None for those that the chat template adds after the question.
    """

    rank: Whole = Field(8, ge=1, le=256)
    alpha: Whole = Field(16, ge=1, le=2**20)
    rslora: bool = False
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    vision: bool = False
    blocks: Whole = Field(1, ge=1)
    activated: bool = False
    invocation: str | None = Field(None, pattern=r"\S")

    @model_validator(mode="after")
    def _activated_after_the_pictures(self) -> LoraPlan:
        if self.invocation is not None and not self.activated:
            raise ValueError("`invocation` is for activated adapters; add `activated: true` or remove it")
        if self.activated and self.vision:
            raise ValueError(
                "`activated` adapters apply to tokens of the language model, `vision` adapts what is computed before "
                "any token; remove one of them"
            )
        if self.activated and self.blocks > 1:
            raise ValueError("`activated` adapters are not block-diagonal; remove `activated` or `blocks`")
        return self


class TrainingPlan(PlanModel):
    """One training per domain, of `steps` steps, or as many of them as fit into `seconds` of processor time.

    rehearsal: share of each batch drawn from the domains already in the adapter. patience: stop after that many
    consecutive evaluations on held-back samples (twelve evaluations in `steps`) without a smaller loss, and restore the
    state with the smallest; None trains to the end. bfloat16: compute in bfloat16 if torch does so safely and the
    processor has instructions for it; the dtype of the weights does not change. gradient_checkpointing: recompute
    activations in the backward pass instead of keeping them.
    """

    steps: Whole = Field(300, ge=1)
    seconds: Number | None = Field(None, gt=0)
    batch_size: Whole = Field(32, ge=1, le=2**16)
    learning_rate: Number = Field(3e-3, gt=0, le=1)
    rehearsal: Number = Field(0.5, ge=0, lt=1)
    patience: Whole | None = Field(None, ge=1)
    bfloat16: bool = True
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _a_batch_has_room_for_both(self) -> TrainingPlan:
        rehearsed = round(self.batch_size * self.rehearsal)
        if self.rehearsal and not 0 < rehearsed < self.batch_size:
            missing = "the new domain" if rehearsed else "the domains before it"
            raise ValueError(
                f"rehearsal {self.rehearsal:g} of a batch of {self.batch_size} leaves no sample for {missing}; "
                "change rehearsal or batch_size, or set rehearsal to 0"
            )
        return self


class RelativeThreshold(PlanModel):
    """A threshold that is measured first: the score of the domain's teacher, or the validation score of an adapter for
    this domain alone, minus `minus`."""

    relative_to: Literal["teacher", "alone"]
    minus: Number = Field(0.0, ge=0, lt=1)


def _kind_of_threshold(value: Any) -> str:
    return "relative" if isinstance(value, dict | RelativeThreshold) else "absolute"


Threshold = Annotated[
    Annotated[Number, Field(gt=0, le=1), Tag("absolute")] | Annotated[RelativeThreshold, Tag("relative")],
    Discriminator(_kind_of_threshold),
]


def _next_to_plan(name: str, info: ValidationInfo) -> str:
    """The full path of a folder next to the plan file; any other name unchanged."""
    folder = (info.context or {}).get("folder")
    if folder is None or name in ("", "embedded") or not os.path.isdir(folder / name):
        return name
    from fusion.synthetic.sources import BUILT_IN  # loads torch, which takes seconds, before other errors in the plan

    return name if name in BUILT_IN else str(folder / name)


FolderName = Annotated[str, AfterValidator(_next_to_plan)]


class DomainPlan(PlanModel):
    """One domain.

    source: a built-in name or an image folder. data: user data. Exactly one of the two is given. task: None for the
    data's default. question: asked about every picture without a question of its own. labels: the labels of a head;
    None for those in the training data. metric, head: None for the task's first (`fusion.plan.schema`). threshold: the
    value from 0 to 1 that the metric must reach on validation data. teacher: labels unlabelled data; for labelled data,
    the model to compare with.
    """

    name: Name
    task: Task | None = None
    source: FolderName | None = None
    data: DataPlan | None = None
    teacher: TeacherPlan | None = None
    question: str = Field(pattern=r"\S")
    labels: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    metric: Metric | None = None
    threshold: Threshold
    head: Head | None = None

    @model_validator(mode="after")
    def _fits(self) -> DomainPlan:
        if (self.source is None) == (self.data is None):
            raise ValueError("needs exactly one of `source` (built in, or an image folder) and `data`")
        if isinstance(self.data, Unlabelled) and self.teacher is None:
            raise ValueError("unlabelled data needs a `teacher`")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels are {list(self.labels)}; labels must be unique")
        return self

    def threshold_before_training(self, teacher_score: float | None) -> float | None:
        """The threshold's value; None if it is known only after training. teacher_score: on validation data."""
        if not isinstance(self.threshold, RelativeThreshold):
            return self.threshold
        if self.threshold.relative_to == "teacher" and teacher_score is not None:
            return teacher_score - self.threshold.minus
        return None


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Plan(PlanModel):
    """A whole run.

    name: of the adapters, which are NAME-1, NAME-2 and so on. base: "embedded", a folder, or a hub name. quantize: the
    format in which the base will be served; trainings and scores use its rounded weights. packing: "guided" trains all
    domains at once and repairs what fails, with a budget; "naive" is the paper's, which tries only the last adapter;
    "first_fit" tries every adapter; "jointly" trains all domains at once and splits them, without rehearsal and without
    a budget. order: the order in which domains are packed, for "naive" and "first_fit"; of several, the best packing is
    kept. confidence: a domain meets its threshold if the lower bound of its validation score at this confidence does;
    None compares the score itself.
    """

    name: Name = "fused"
    base: FolderName = "embedded"
    quantize: Quantize = "none"
    seed: Whole = Field(0, ge=0)
    packing: Packer = "guided"
    lora: LoraPlan = LoraPlan()
    training: TrainingPlan = TrainingPlan()
    order: Annotated[tuple[Order, ...], BeforeValidator(_as_tuple)] = Field(
        ("given",), min_length=1, max_length=_MOST_ORDERS
    )
    confidence: Number | None = Field(0.95, gt=0.5, lt=1)
    domains: tuple[DomainPlan, ...]

    # A field that the plan sets is applied or refused. A default is not checked here.
    @field_validator("order")
    @classmethod
    def _in_sequence(cls, order: tuple[Order, ...], info: ValidationInfo) -> tuple[Order, ...]:
        if (packing := info.data.get("packing")) in ("guided", "jointly"):
            raise ValueError(
                f"`packing: {packing}` trains domains at once, without an order; remove `order`, or set "
                "`packing: first_fit`"
            )
        if "similarity" in order and (lora := info.data.get("lora")) is not None and lora.vision:
            raise ValueError(
                "`similarity` compares image features, which trainings change with `lora.vision: true`; choose another "
                "order, or remove `vision`"
            )
        return order

    @field_validator("training")
    @classmethod
    def _beside_others(cls, training: TrainingPlan, info: ValidationInfo) -> TrainingPlan:
        if info.data.get("packing") == "jointly" and "rehearsal" in training.model_fields_set:
            raise ValueError("`packing: jointly` trains domains at once, without rehearsal; remove `rehearsal`")
        return training

    @model_validator(mode="after")
    def _names_differ(self) -> Plan:
        if not self.domains:
            raise ValueError("`domains` is empty; a plan needs at least one")
        seen: set[str] = set()
        for domain in self.domains:
            if domain.name in seen:
                raise ValueError(f"two domains are named {domain.name!r}; names must be unique")
            seen.add(domain.name)
        return self


_FORMS = ("data", "teacher", "threshold")


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan with the text it was read from, so that later errors can be reported with their line."""

    plan: Plan
    text: PlanText


def read_plan_file(path: Path | str | PlanFile) -> PlanFile:
    """Read and check a plan file; a plan that was read already is returned. Raises BadPlan with file, line and field of
    every error."""
    if isinstance(path, PlanFile):
        return path
    return PlanFile(*read_model(path, Plan, needed="domains", forms=_FORMS))
