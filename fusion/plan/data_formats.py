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


Exif = Literal["ignore", "apply"]


class _Boxes(_Data):
    """images: the folder of the pictures; by default it is searched beside the file and where tools export it. exif:
    whether the tool that drew the boxes ignored the rotation in a picture's EXIF, so that they are of the pixels as
    stored, or applied it; None to decide by the sizes in the file, if they show it."""

    images: PlanPath | None = None
    exif: Exif | None = None


class Coco(_Boxes):
    """path: a COCO instances or captions file, or a folder with one for each part."""

    format: Literal["coco"]


class Yolo(_Boxes):
    """path: a data.yaml, or a folder with one, or with pictures, label files and classes.txt or obj.names."""

    format: Literal["yolo"]


class Voc(_Boxes):
    """path: a folder with an XML file for each picture, in Pascal VOC's form."""

    format: Literal["voc"]


class VideoFolder(_Data):
    """path/LABEL/VIDEO, or path/{train,validation,test}/LABEL/VIDEO; or path/VIDEO with `labels`, a CSV or JSONL file
    with the fields video, label and optionally split, start_s, end_s. columns: as of `questions`. frames: number of
    evenly spaced frames."""

    format: Literal["video_folder"]
    labels: PlanPath | None = None
    columns: dict[Literal["video", "label", "split", "start_s", "end_s"], str] = Field(default_factory=dict)
    frames: Whole = Field(4, ge=1, le=64)


class Questions(_Data):
    """path: a CSV or JSONL file with the fields image and answer and optionally question, split, group. images: the
    folder that its pictures are relative to; the file's own folder by default. columns: the file's name of a field, if
    it is not one that is known for it (path, label, ...). Rows of one group stay in one part."""

    format: Literal["questions"]
    images: PlanPath | None = None
    columns: dict[Literal["image", "answer", "question", "split", "group"], str] = Field(default_factory=dict)


class References(_Boxes):
    """path: a JSON list of referring expressions in RefCOCO's form (ref_id, ann_id, image_id, sentences and optionally
    split). instances: the COCO file with their annotations."""

    format: Literal["references"]
    instances: PlanPath


class Unlabelled(_Data):
    """path: a folder of pictures or videos, at any depth, which a teacher labels. frames: number of evenly spaced
    frames per video."""

    format: Literal["unlabelled"]
    frames: Whole = Field(4, ge=1, le=64)


DataPlan = Annotated[
    ImageFolder | Coco | Yolo | Voc | VideoFolder | Questions | References | Unlabelled, Field(discriminator="format")
]
