"""Pictures with answers: an adapter's on test samples, with confusion matrices, and a plan's on a contact sheet."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fusion.data.samples import Sample, Splits, Target
from fusion.data.targets import labels_shown
from fusion.report.report import ConfusionReport
from fusion.training.objectives import Objective
from heads import Box
from vlora.training.records import PARTS

_SHOWN, _SHOWN_RIGHT = 6, 2  # test samples of a domain, and how many of these are answered correctly if others are not
_HEIGHT = 168  # pixels of a picture
_SURE = 0.5  # minimum score of a box that is shown; lower ones only count for mean average precision
_FOUND, _WANTED = (255, 90, 40), (60, 220, 120)  # RGB
_CELL, _COLUMNS, _LINE, _MARGIN = 224, 6, 16, 10  # of a contact sheet, in pixels
_OF_PART = {"train": 6, "validation": 3, "test": 3}  # samples on it
_SEARCHED = 500  # samples of a part among which those with other labels are sought


@dataclasses.dataclass(frozen=True)
class Example:
    """One test sample.

    pictures: JPEG as data URLs, a clip's frames in order. answer: None if an answer in words is only known to be
    correct or wrong. score: the domain's metric on this sample.
    """

    pictures: tuple[str, ...]
    question: str
    wanted: str
    answer: str | None
    score: float


def confusion_of(
    name: str, labels: Sequence[str], answers: Sequence[object], targets: Sequence[Target]
) -> ConfusionReport | None:
    """Confusion matrix of a domain; None if answers are not label indices."""
    counts = np.zeros((len(labels), len(labels)), int)
    for shown, answer in zip(targets, answers, strict=True):
        if not (labels and isinstance(shown, int) and isinstance(answer, int)):
            return None
        counts[shown, answer] += 1
    return ConfusionReport(name, tuple(labels), tuple(map(tuple, counts.tolist())))


def examples_of(
    samples: Sequence[Sample],
    answers: Sequence[object],
    labels: Sequence[str],
    objective: Objective,
    question: str,
) -> tuple[Example, ...]:
    """Test samples with their answers: the worst first, then some that were answered correctly."""
    scores = [objective.metric([answer], [sample.target]) for sample, answer in zip(samples, answers, strict=True)]
    wrong = sorted((place for place, score in enumerate(scores) if score < 1), key=scores.__getitem__)
    right = [place for place, score in enumerate(scores) if score >= 1]
    num_wrong = max(_SHOWN - _SHOWN_RIGHT, _SHOWN - len(right))
    places = [*wrong[:num_wrong], *right][:_SHOWN]
    return tuple(_example(samples[place], answers[place], labels, question, scores[place]) for place in places)


def _example(sample: Sample, answer: object, labels: Sequence[str], question: str, score: float) -> Example:
    return Example(
        tuple(_drawn(frame, place, sample.target, answer, labels) for place, frame in _shown(sample)),
        sample.question or question,
        _in_words(sample.target, labels),
        None if answer is None or isinstance(answer, bool) else _in_words(answer, labels),
        score,
    )


def _shown(sample: Sample) -> list[tuple[int, np.ndarray]]:
    """All frames of a sample with indices, or the first and last frame of three or more."""
    frames = list(enumerate(sample.frames))
    return frames if len(frames) < 3 else [frames[0], frames[-1]]


def _in_words(value: object, labels: Sequence[str]) -> str:
    if isinstance(value, int):
        return labels[value] if value < len(labels) else str(value)
    if isinstance(value, tuple):
        sure = [each for each in value if not isinstance(each, Box) or each.score >= _SURE]
        return (
            ", ".join(labels[each.label] if isinstance(each, Box) else _in_words(each, labels) for each in sure)
            or "nothing"
        )
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _drawn(frame: np.ndarray, place: int, target: object, answer: object, labels: Sequence[str]) -> str:
    """The picture at the report's size, with target boxes (thin) and predicted boxes, as a URL."""
    scale = _HEIGHT / frame.shape[0]
    size = (max(1, round(frame.shape[1] * scale)), _HEIGHT)
    picture = cv2.resize(frame, size, interpolation=cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA)
    for value, color, thickness in ((target, _WANTED, 1), (answer, _FOUND, 2)):
        for box in value if isinstance(value, tuple) else ():
            if isinstance(box, Box) and box.image == place and box.score >= _SURE:
                x, y = np.array([box.left, box.right]) * size[0], np.array([box.top, box.bottom]) * size[1]
                corners = [(round(a), round(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
                cv2.rectangle(picture, corners[0], corners[1], color, thickness)
                if value is answer:
                    at = (corners[0][0], max(10, corners[0][1] - 3))
                    cv2.putText(picture, labels[box.label], at, cv2.FONT_HERSHEY_SIMPLEX, 0.36, color, 1, cv2.LINE_AA)
    encoded = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 88])[1]
    return f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"


def contact_sheet(domains: Mapping[str, Splits]) -> Image.Image:
    """Samples of each domain as they were read, with labels and boxes; as many labels as there is room for."""
    font = ImageFont.load_default(13)
    height = _HEIGHT + 3 * _LINE + _MARGIN
    chosen = {
        name: [(part, one) for part in PARTS for one in _varied(splits, part)] for name, splits in domains.items()
    }
    rows = {name: -(-len(samples) // _COLUMNS) for name, samples in chosen.items()}
    size = _MARGIN + _COLUMNS * (_CELL + _MARGIN), sum(2 * _LINE + count * height for count in rows.values())
    sheet = Image.new("RGB", size, "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for name, samples in chosen.items():
        draw.text((_MARGIN, top + 8), f"{name}: {domains[name].task}", "black", font)
        top += 2 * _LINE
        for place, (part, sample) in enumerate(samples):
            left, upper = _MARGIN + place % _COLUMNS * (_CELL + _MARGIN), top + place // _COLUMNS * height
            sheet.paste(_cell(sample, domains[name].labels, font), (left, upper))
            words = (part, sample.question, _in_words(sample.target, domains[name].labels))
            for line, text in enumerate(word for word in words if word):
                shown = text.split("\n")[0][:200]
                while font.getlength(shown) > _CELL:
                    shown = shown.removesuffix("...")[:-1] + "..."
                draw.text((left, upper + _HEIGHT + 2 + line * _LINE), shown, "black" if line else "grey", font)
        top += rows[name] * height
    return sheet


def _varied(splits: Splits, part: str) -> list[Sample]:
    """Samples of a part: first such with labels that those before lack."""
    seen: set[int] = set()
    first: list[Sample] = []
    others: list[Sample] = []
    for sample in splits.parts[part][:_SEARCHED]:
        labels = set(labels_shown(splits.task, sample.target)) if splits.labels else set()
        (first if labels - seen else others).append(sample)
        seen |= labels
    return [*first, *others][: _OF_PART[part]]


def _cell(sample: Sample, labels: Sequence[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Image.Image:
    """The first picture of a sample with its boxes, as large as a cell of the contact sheet."""
    source = Image.fromarray(sample.frames[0])
    scale = min(_CELL / source.width, _HEIGHT / source.height)
    picture = source.resize((max(1, round(source.width * scale)), max(1, round(source.height * scale))))
    draw = ImageDraw.Draw(picture)
    for box in sample.target if isinstance(sample.target, tuple) else ():
        if isinstance(box, Box) and box.image == 0:
            left, right = (edge * picture.width for edge in (box.left, box.right))
            top, bottom = (edge * picture.height for edge in (box.top, box.bottom))
            draw.rectangle((left, top, right, bottom), outline=_FOUND, width=2)
            at = (left, max(0, top - _LINE))
            draw.rectangle(draw.textbbox(at, labels[box.label], font), fill=_FOUND)
            draw.text(at, labels[box.label], "white", font)
    return picture
