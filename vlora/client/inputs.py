"""The arguments of calls that are made from images, questions and heads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlora.adapter_files import ADAPTER_FILES, other_weights, why_unreadable
from vlora.client.requests import Generate, SentVisual
from vlora.client.values import TextQuestion, sampling_params
from vlora.errors import BadAdapter, BadImage, BadRequest
from vlora.types import adapter_name
from vlora.types.domain import Way
from vlora.types.video import Video, VideoFile

Image = bytes | bytearray | memoryview | str | os.PathLike[str]
"""An encoded image (JPEG, PNG, ...), or the path of one."""

Visual = Image | Video[Image] | VideoFile[Image]
"""An image; a video as its frames with their times; or one that is encoded, as bytes or a path."""

FrameImage = Image | tuple[bytes, int, int] | Any
"""An image of a frame: an Image; or (RGB bytes, height, width); or an array of bytes [height, width, 3], RGB."""

Documents = Sequence[str | Sequence[Visual]]
"""Texts, and lists of pictures and videos (a path in such a list is a picture's)."""

PICTURE_QUESTION = "Is there {}?"
TEXT_QUESTION = "Is this about {}?"
"""Asked about a document to score it, with the query in the place of the braces."""

Adapter = str | Mapping[str, float]
"""The name of an adapter or a domain, a composition as text (`a+b`, `0.7*a+0.3*b`), or the weights of one by name."""


def stream_heads(
    adapter: str | None, head: str | None, heads: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """All heads of a stream. Raises BadRequest for an adapter without its head, and the reverse."""
    if (adapter is None) != (head is None):
        raise BadRequest(f"adapter is {adapter!r} and head is {head!r}; give both, or neither")
    first = () if adapter is None or head is None else ((adapter, head),)
    try:
        return first + tuple((adapter, head) for adapter, head in heads)
    except (TypeError, ValueError) as error:
        raise BadRequest("heads must be pairs of an adapter and one of its heads") from error


def stream_questions(questions: Sequence[TextQuestion]) -> tuple[TextQuestion, ...]:
    """The questions of a stream. Raises BadRequest for other values."""
    if isinstance(questions, str) or not all(isinstance(each, TextQuestion) for each in questions):
        raise BadRequest("questions must be values of vlora.client.TextQuestion")
    return tuple(questions)


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Encoded bytes of every image. Raises BadImage when a file cannot be read."""
    return tuple(_read(image) for image in images)


def question_about(query: str, question: str) -> str:
    """The question about a query. Raises BadRequest."""
    if not query.strip():
        raise BadRequest("the query is empty; write what to look for, such as 'a white car'", field="query")
    if question.count("{}") != 1:
        raise BadRequest(f"question is {question[:99]!r}; write {{}} once, in the query's place", field="question")
    return question.replace("{}", " ".join(query.split()))


def read_adapter(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of an adapter's folder by name. Raises BadAdapter if they cannot be read or served."""
    folder = Path(path)
    try:
        if problem := other_weights(folder):
            raise BadAdapter(f"{folder}: {problem}")
        return {name: (folder / name).read_bytes() for name in ADAPTER_FILES if (folder / name).exists()}
    except OSError as error:
        raise BadAdapter(f"{error.filename or folder}: cannot read: {why_unreadable(error)}") from error


def read_documents(documents: Documents) -> tuple[str | tuple[SentVisual, ...], ...]:
    """Raises BadImage, and BadRequest for a text or picture in place of a list of them."""
    if isinstance(documents, str) or any(isinstance(one, bytes | os.PathLike) for one in documents):
        raise BadRequest("a text or picture is in place of a list; pass a list of texts and of lists of pictures")
    return tuple(one if isinstance(one, str) else tuple(map(read_visual, one)) for one in documents)


def read_visual(visual: Visual) -> SentVisual:
    """Raises BadImage, and BadRequest for a video with wrong times."""
    if isinstance(visual, VideoFile):
        return VideoFile(_read(visual.content), visual.fps, visual.num_frames)
    if not isinstance(visual, Video):
        return _read(visual)
    visual.check()
    return Video(read_images(visual.frames), tuple(map(float, visual.times)))


def read_frame(images: Sequence[FrameImage]) -> tuple[Any, ...]:
    """The images as values that can be sent. Raises BadImage for other types."""
    return tuple(_read_raw(image) for image in images)


def _read_raw(image: FrameImage) -> bytes | tuple[bytes, int, int]:
    if isinstance(image, bytes | bytearray | memoryview | str | os.PathLike):
        return _read(image)
    if isinstance(image, tuple):
        try:
            pixels, height, width = image
            return bytes(pixels), int(height), int(width)
        except (TypeError, ValueError) as error:
            raise BadImage("a raw image is (RGB bytes, height, width)") from error
    try:
        view = memoryview(image)
    except (TypeError, ValueError) as error:  # ValueError: arrays of a type without a buffer, such as dates
        raise BadImage(f"cannot use a {type(image).__name__} as an image; pass bytes, a path, or RGB pixels") from error
    if view.format != "B" or view.ndim != 3 or view.shape is None or view.shape[2] != 3:
        raise BadImage(
            f"cannot use an array of {view.format} {view.shape} as an image; pass uint8 [height, width, 3], RGB"
        )
    return view.tobytes(), view.shape[0], view.shape[1]


def text_request(
    question: str,
    images: Sequence[Visual] = (),
    adapter: Adapter | None = None,
    max_latency_s: float | None = None,
    max_ttft_s: float | None = None,
    priority: int = 0,
    answer: Way | None = None,
    **sampling: Any,
) -> Generate:
    """Raises BadImage, and BadRequest for invalid options of sampling and weights of a composition."""
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    return Generate(
        question=question,
        images=tuple(read_visual(one) for one in images),
        adapter=adapter_name(adapter) if isinstance(adapter, Mapping) else adapter,
        sampling=sampling_params(sampling),
        max_latency_s=max_latency_s,
        max_ttft_s=max_ttft_s,
        priority=priority,
        answer=answer,
    )


def _read(image: Image) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImage(f"cannot read image {os.fspath(image)!r}: {why}") from error
