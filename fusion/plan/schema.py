"""The plan file: domains, their data and their thresholds. Mistakes are reported with file, line and field."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fusion.plan.mistakes import Location, Mistakes, PlanText
from fusion.plan.tasks import Head, Metric, Task
from fusion.plan.yaml_text import read_yaml
from fusion.synthetic.sources import BUILT_IN
from vlora.errors import BadPlan
from vlora.wording import pydantic_errors
from vlora.wording.shown import shown

_MOST_ORDERS = 64
_FUNCTION = r"^[\w.]+:\w+$"
Order = Literal["given", "random", "similarity", "hardest_first"]


def _from_plan(path: Path, info: ValidationInfo) -> Path:
    """Paths in a plan file are relative to its folder, not to the working directory."""
    folder = (info.context or {}).get("folder")
    return path if folder is None else folder / path


PlanPath = Annotated[Path, AfterValidator(_from_plan)]


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # Python takes true as 1, and YAML reads `yes` as true
        raise ValueError(f"is {shown(value)}; it must be a number")
    return value


Whole = Annotated[int, BeforeValidator(_no_switch)]
Number = Annotated[float, BeforeValidator(_no_switch)]


class _Strict(BaseModel):
    # A misspelt field must not silently mean its default.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraPlan(_Strict):
    """Adapter settings.

    rslora: scale by alpha / sqrt(rank) instead of alpha / rank. targets: the linear layers of the language model that
    get a delta, by the last part of their names (q_proj, ...); None for all. vision: also adapt all linear layers of
    the vision tower and the projector. blocks: number of blocks of block-diagonal factors (BD-LoRA), one per serving
    rank; each block is a LoRA of rank / blocks and is scaled as such.
    """

    rank: Whole = Field(8, ge=1, le=256)
    alpha: Whole = Field(16, ge=1, le=2**20)
    rslora: bool = False
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    vision: bool = False
    blocks: Whole = Field(1, ge=1)


class TrainingPlan(_Strict):
    """One training per domain, of `steps` steps, or as many of them as fit into `seconds` of processor time.

    rehearsal: share of each batch drawn from the domains already in the adapter. patience: stop after that many
    consecutive evaluations on held-back samples (twelve evaluations in `steps`) without a smaller loss, and restore the
    state with the smallest; None trains to the end. bfloat16: compute in bfloat16 if torch does so safely and the
    processor has instructions for it; the dtype of the weights does not change. gradient_checkpointing: recompute
    activations in the backward pass instead of keeping them.
    """

    steps: Whole = Field(120, ge=1)
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


class SplitPlan(_Strict):
    """Shares of validation and test for data without parts; the rest is for training."""

    validation: Number = Field(0.15, gt=0, lt=1)
    test: Number = Field(0.15, gt=0, lt=1)

    @model_validator(mode="after")
    def _something_trains(self) -> SplitPlan:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation {self.validation} and test {self.test} leave nothing to train on")
        return self


class _Data(_Strict):
    """path: a folder or file. split: for data that defines no parts."""

    path: PlanPath
    split: SplitPlan = SplitPlan()


class ImageFolder(_Data):
    """path/LABEL/PICTURE, or path/{train,validation,test}/LABEL/PICTURE."""

    format: Literal["image_folder"]


class Coco(_Data):
    """path: a COCO instances file, or a folder with train.json, validation.json and test.json. images: the folder that
    its `file_name`s are relative to; the file's own folder by default."""

    format: Literal["coco"]
    images: PlanPath | None = None


class VideoFolder(_Data):
    """path/LABEL/VIDEO, or path/{train,validation,test}/LABEL/VIDEO; or path/VIDEO with `labels`, a CSV or JSONL file
    with the fields video, label and optionally split, start_s, end_s. frames: number of evenly spaced frames."""

    format: Literal["video_folder"]
    labels: PlanPath | None = None
    frames: Whole = Field(4, ge=1, le=64)


class Questions(_Data):
    """path: a CSV or JSONL file with the fields image and answer and optionally question, split, group. images: the
    folder that its pictures are relative to; the file's own folder by default. Rows of one group stay in one part."""

    format: Literal["questions"]
    images: PlanPath | None = None


class References(_Data):
    """path: a JSON list of referring expressions in RefCOCO's form (ref_id, ann_id, image_id, sentences and optionally
    split). instances: the COCO file with their annotations. images: the folder that its `file_name`s are relative to;
    the file's own folder by default."""

    format: Literal["references"]
    instances: PlanPath
    images: PlanPath | None = None


class Unlabelled(_Data):
    """path: a folder of pictures or videos, at any depth, which a teacher labels. frames: number of evenly spaced
    frames per video."""

    format: Literal["unlabelled"]
    frames: Whole = Field(4, ge=1, le=64)


DataPlan = Annotated[
    ImageFolder | Coco | VideoFolder | Questions | References | Unlabelled, Field(discriminator="format")
]


class _Teacher(_Strict):
    """min_confidence: answers (for a detector: boxes) below this confidence are dropped. allow_code: allow loading of
    user code, and of files that can run code when they are loaded."""

    min_confidence: Number = Field(0.0, ge=0, le=1)
    allow_code: bool = False


class BuiltInTeacher(_Teacher):
    """The package's small model for a built-in source; it is trained on the domain's training part."""

    kind: Literal["built_in"]


class _Detector(_Teacher):
    """absent: the label of a picture without detections, for the task classification."""

    absent: str = "nothing"


class CascadeTeacher(_Detector):
    """An OpenCV cascade, which detects one kind of object. file: XML; None for OpenCV's frontal faces. label: name of
    the detected objects."""

    kind: Literal["cascade"]
    file: PlanPath | None = None
    label: str = "face"


class HogTeacher(_Detector):
    """OpenCV's detector of people. label: name of the detected people."""

    kind: Literal["hog"]
    label: str = "person"


class SklearnTeacher(_Teacher):
    """A fitted scikit-learn classifier over grey pixels of `size` x `size`, 0 to 1, row by row. file: skops; or joblib
    or pickle, which run code. labels: label of each class, in order; None for the classes' own names."""

    kind: Literal["sklearn"]
    file: PlanPath
    size: Whole = Field(ge=1, le=1024)
    labels: tuple[str, ...] | None = None


class _Network(_Teacher):
    """labels: label of each output. size: height and width in pixels of its input [1, 3, size, size]. mean, std: the
    normalisation of colours from 0 to 1."""

    file: PlanPath
    labels: tuple[str, ...] = Field(min_length=2)
    size: Whole = Field(ge=8, le=2048)
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @field_validator("std")
    @classmethod
    def _positive(cls, std: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(std) <= 0:
            raise ValueError(f"{list(std)} must be above 0")
        return std


class TorchTeacher(_Network):
    """A torch module that returns logits [1, labels]. file: its weights (safetensors), with `module`, the PACKAGE:NAME
    of the function that builds it; or a TorchScript file; or a torch.export file (.pt2). All of them run code."""

    kind: Literal["torch"]
    module: str | None = Field(None, pattern=_FUNCTION)


class OnnxTeacher(_Network):
    """An ONNX classifier run by OpenCV; it returns logits or probabilities [1, labels]."""

    kind: Literal["onnx"]


class TransformersTeacher(_Detector):
    """A classifier of pictures or videos, or a detector, from a local folder in transformers' format. Weights that are
    not safetensors run code. rename: maps its labels to the domain's."""

    kind: Literal["transformers"]
    path: PlanPath
    rename: dict[str, str] = Field(default_factory=dict)


class CallableTeacher(_Teacher):
    """A user function MODULE:FUNCTION from a list of RGB pictures to (answer, confidence)."""

    kind: Literal["callable"]
    function: str = Field(pattern=_FUNCTION)


TeacherPlan = Annotated[
    BuiltInTeacher
    | CascadeTeacher
    | HogTeacher
    | SklearnTeacher
    | TorchTeacher
    | OnnxTeacher
    | TransformersTeacher
    | CallableTeacher,
    Field(discriminator="kind"),
]


class RelativeThreshold(_Strict):
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


class DomainPlan(_Strict):
    """One domain.

    source: a built-in name or an image folder. data: user data. Exactly one of the two is given. task: None for the
    data's default. question: asked about every picture without a question of its own. labels: the labels of a head;
    None for those in the training data. metric, head: None for the task's first (`fusion.plan.tasks`). threshold: the
    value from 0 to 1 that the metric must reach on validation data. teacher: labels unlabelled data; for labelled data,
    the model to compare with.
    """

    name: str = Field(max_length=100, pattern=r"^[A-Za-z0-9_-]+$")  # also used as a folder name
    task: Task | None = None
    source: str | None = None
    data: DataPlan | None = None
    teacher: TeacherPlan | None = None
    question: str = Field(pattern=r"\S")
    labels: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    metric: Metric | None = None
    threshold: Threshold
    head: Head | None = None

    @field_validator("source")
    @classmethod
    def _folder_from_plan(cls, source: str | None, info: ValidationInfo) -> str | None:
        return _beside(source, info) if source else source

    @model_validator(mode="after")
    def _fits(self) -> DomainPlan:
        if (self.source is None) == (self.data is None):
            raise ValueError("needs exactly one of `source` (built in, or an image folder) and `data`")
        if isinstance(self.data, Unlabelled) and self.teacher is None:
            raise ValueError("unlabelled data needs a `teacher`")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels are {list(self.labels)}; labels must be unique")
        return self


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Plan(_Strict):
    """A whole run.

    base: "embedded", a folder, or a hub name. packing: "naive" is the paper's, which tries only the last adapter;
    "first_fit" tries every adapter; "jointly" trains all domains at once and splits them, without an order and without
    rehearsal. order: the order in which domains are packed; of several, the best packing is kept. confidence: a domain
    meets its threshold if the lower bound of its validation score at this confidence does; None compares the score
    itself.
    """

    base: str = "embedded"
    seed: Whole = Field(0, ge=0)
    packing: Literal["naive", "first_fit", "jointly"] = "first_fit"
    lora: LoraPlan = LoraPlan()
    training: TrainingPlan = TrainingPlan()
    order: Annotated[tuple[Order, ...], BeforeValidator(_as_tuple)] = Field(
        ("given",), min_length=1, max_length=_MOST_ORDERS
    )
    confidence: Number | None = Field(None, gt=0.5, lt=1)
    domains: tuple[DomainPlan, ...]

    @field_validator("base")
    @classmethod
    def _folder_from_plan(cls, base: str, info: ValidationInfo) -> str:
        return _beside(base, info)

    # A field that the plan sets is applied or refused. A default is not checked here.
    @field_validator("order")
    @classmethod
    def _in_sequence(cls, order: tuple[Order, ...], info: ValidationInfo) -> tuple[Order, ...]:
        if info.data.get("packing") == "jointly":
            raise ValueError("`packing: jointly` trains domains at once, without an order; remove `packing` or `order`")
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


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan with the text it was read from, so that later errors can be reported with their line."""

    plan: Plan
    text: PlanText


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan file. Raises BadPlan with file, line and field."""
    return read_plan_file(path).plan


def read_plan_file(path: Path | str) -> PlanFile:
    """Like `read_plan`, with the line of each field. Raises BadPlan with file, line and field of every mistake."""
    path = Path(path)
    tree, content = read_yaml(path)
    if not isinstance(content, dict):
        raise BadPlan(f"{path}, line 1: a plan is a mapping with the field `domains`, found {type(content).__name__}")
    text = PlanText(path, tree)
    try:
        return PlanFile(Plan.model_validate(content, context={"folder": path.absolute().parent}), text)
    except ValidationError as error:
        mistakes = Mistakes(text)
        found = error.errors()
        for mistake in found:
            inside = any(other["loc"][:-1] == mistake["loc"] for other in found)
            if mistake["type"] != "too_short" or not inside:  # invalid items are not also reported as too few
                mistakes.add(pydantic_errors.described(mistake), *_without_tags(mistake["loc"]))
        mistakes.refuse()
        raise


# Fields with several forms. pydantic adds the form it tried after the field's name; the file has no such step.
_FORMS = ("data", "teacher", "threshold")


def _without_tags(location: Location) -> Location:
    kept: list[int | str] = []
    for before, step in zip((None, *location), location, strict=False):
        if before not in _FORMS:
            kept.append(step)
    return tuple(kept)


def _beside(name: str, info: ValidationInfo) -> str:
    """The full path of a folder next to the plan file; any other name unchanged."""
    folder = (info.context or {}).get("folder")
    if folder is None or name == "embedded" or name in BUILT_IN or not os.path.isdir(folder / name):
        return name
    return str(folder / name)
