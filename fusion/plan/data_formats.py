"""The `data` of a plan's domain: the formats of user data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlora.plan_files.fields import Number, PlanModel, PlanPath, Whole


class SplitPlan(PlanModel):
    """Shares of validation and test for data without parts; the rest is for training."""

    validation: Number = Field(0.15, gt=0, lt=1)
    test: Number = Field(0.15, gt=0, lt=1)

    @model_validator(mode="after")
    def _something_trains(self) -> SplitPlan:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation {self.validation} and test {self.test} leave nothing to train on")
        return self


class _Data(PlanModel):
    """path: a folder or file. split: for data that defines no parts."""

    path: PlanPath
    split: SplitPlan = SplitPlan()


class ImageFolder(_Data):
    """path/LABEL/PICTURE, or path/{train,validation,test}/LABEL/PICTURE."""

    format: Literal["image_folder"]


Orientation = Literal["stored", "upright"]


class Coco(_Data):
    """path: a COCO instances file, or a folder with train.json, validation.json and test.json. images: the folder that
    its `file_name`s are relative to; the file's own folder by default. orientation: whether boxes of pictures that EXIF
    rotates are of the pixels as stored or as shown; None to decide by their sizes."""

    format: Literal["coco"]
    images: PlanPath | None = None
    orientation: Orientation | None = None


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
    the file's own folder by default. orientation: as of `coco`."""

    format: Literal["references"]
    instances: PlanPath
    images: PlanPath | None = None
    orientation: Orientation | None = None


class Unlabelled(_Data):
    """path: a folder of pictures or videos, at any depth, which a teacher labels. frames: number of evenly spaced
    frames per video."""

    format: Literal["unlabelled"]
    frames: Whole = Field(4, ge=1, le=64)


DataPlan = Annotated[
    ImageFolder | Coco | VideoFolder | Questions | References | Unlabelled, Field(discriminator="format")
]
