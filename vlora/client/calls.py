"""The client's calls as data: the blocking and the asyncio client share every call and differ only in how they wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from vlora.client.values import (
    Answer,
    FrameResults,
    HeadOutcome,
    HeadResult,
    StreamOptions,
    StreamPart,
    TextQuestion,
    sampling_pairs,
    sampling_params,
)
from vlora.errors import BadImage, BadRequest
from vlora.types import AdapterStatus, EngineStats, TrainingStatus, adapter_name
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus
from vlora.types.video import Video

T = TypeVar("T")

Image = bytes | bytearray | memoryview | str | os.PathLike[str]
"""An encoded image (JPEG, PNG, ...), or the path of one."""

Visual = Image | Video[Image]
"""An image, or a video as its frames with their times."""

FrameImage = Image | tuple[bytes, int, int] | Any
"""An image of a frame: an Image; or (RGB bytes, height, width); or an array of bytes [height, width, 3], RGB."""


Adapter = str | Mapping[str, float]
"""An adapter's name, a composition of adapters as text (`a+b`, `0.7*a+0.3*b`), or the weights of one by adapter."""


class Call(NamedTuple, Generic[T]):
    """One exposed method and its arguments. num_bytes: the size of the images in the message."""

    name: str
    args: tuple[Any, ...]
    returns: type[T]
    num_bytes: int = 0


def generate(
    call_id: int,
    question: str,
    images: Sequence[Visual],
    adapter: Adapter | None,
    max_latency_s: float | None,
    max_ttft_s: float | None,
    priority: int,
    sampling: Mapping[str, Any],
) -> Call[Answer]:
    args, num_bytes = _text_args(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling)
    return Call("generate", args, Answer, num_bytes)


def stream(
    call_id: int,
    question: str,
    images: Sequence[Visual],
    adapter: Adapter | None,
    max_latency_s: float | None,
    max_ttft_s: float | None,
    priority: int,
    sampling: Mapping[str, Any],
) -> Call[StreamPart]:
    args, num_bytes = _text_args(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling)
    return Call("stream", args, StreamPart, num_bytes)


def cancel(call_id: int) -> Call[None]:
    return Call("cancel", (call_id,), type(None))


def ask_head(
    call_id: int, images: Sequence[Image], adapter: str, head: str, max_latency_s: float | None, priority: int
) -> Call[HeadResult]:
    encoded = read_images(images)
    args = (call_id, encoded, adapter, head, max_latency_s, priority)
    return Call("ask_head", args, HeadResult, sum(map(len, encoded)))


def ask_heads(
    call_id: int,
    images: Sequence[Image],
    heads: Sequence[tuple[str, str]],
    max_latency_s: float | None,
    priority: int,
) -> Call[tuple[HeadOutcome, ...]]:
    encoded = read_images(images)
    pairs = tuple((adapter, head) for adapter, head in heads)
    args = (call_id, encoded, pairs, max_latency_s, priority)
    return Call("ask_heads", args, tuple[HeadOutcome, ...], sum(map(len, encoded)))


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
    """The questions of a stream. Raises BadRequest for values that are not questions."""
    if isinstance(questions, str) or not all(isinstance(each, TextQuestion) for each in questions):
        raise BadRequest("questions must be values of vlora.client.TextQuestion")
    return tuple(questions)


def open_frames(options: StreamOptions) -> Call[str]:
    heads, questions, *others = msgspec.structs.astuple(options)
    # RPyC sends no subclasses of tuple.
    return Call("open_frames", (heads, tuple(map(tuple, questions)), *others), str)


def send_frame(stream_id: str, number: int, images: tuple[Any, ...], wait_s: float) -> Call[bool]:
    num_bytes = sum(len(image[0] if isinstance(image, tuple) else image) for image in images)
    return Call("send_frame", (stream_id, number, images, wait_s), bool, num_bytes)


def pull_results(stream_id: str, acknowledged: int, wait_s: float) -> Call[FrameResults]:
    return Call("pull_results", (stream_id, acknowledged, wait_s), FrameResults)


def end_frames(stream_id: str) -> Call[None]:
    return Call("end_frames", (stream_id,), type(None))


def close_frames(stream_id: str) -> Call[None]:
    return Call("close_frames", (stream_id,), type(None))


def adapters() -> Call[tuple[AdapterStatus, ...]]:
    return Call("adapters", (), tuple[AdapterStatus, ...])


def load_adapter(name: str, path: str | os.PathLike[str]) -> Call[AdapterStatus]:
    return Call("load_adapter", (name, os.fspath(path)), AdapterStatus)


def unload_adapter(name: str, drain: bool) -> Call[None]:
    return Call("unload_adapter", (name, drain), type(None))


def pin_adapter(name: str, pinned: bool) -> Call[AdapterStatus]:
    return Call("pin_adapter", (name, pinned), AdapterStatus)


def train(plan: str | os.PathLike[str]) -> Call[tuple[TrainingStatus, ...]]:
    return Call("train", (os.fspath(plan),), tuple[TrainingStatus, ...])


def trainings() -> Call[tuple[TrainingStatus, ...]]:
    return Call("trainings", (), tuple[TrainingStatus, ...])


def cancel_training(name: str) -> Call[TrainingStatus]:
    return Call("cancel_training", (name,), TrainingStatus)


def correct(answer: Answer | str, label: str) -> Call[Correction]:
    return Call("correct", (answer if isinstance(answer, str) else answer.request_id, label), Correction)


def learning() -> Call[tuple[LearningStatus, ...]]:
    return Call("learning", (), tuple[LearningStatus, ...])


def promote(name: str, version: str | None, path: str | os.PathLike[str] | None, force: bool) -> Call[LearningStatus]:
    return Call("promote", (name, version, None if path is None else os.fspath(path), force), LearningStatus)


def roll_back(name: str, version: str | None) -> Call[LearningStatus]:
    return Call("roll_back", (name, version), LearningStatus)


def stats() -> Call[EngineStats]:
    return Call("stats", (), EngineStats)


def cluster() -> Call[ClusterStatus]:
    return Call("cluster", (), ClusterStatus)


def cluster_adapters() -> Call[tuple[AdapterPlace, ...]]:
    return Call("cluster_adapters", (), tuple[AdapterPlace, ...])


def drain_replica(name: str, wait_s: float) -> Call[bool]:
    return Call("drain_replica", (name, wait_s), bool)


def scale(number: int | Literal["auto"], wait_s: float) -> Call[bool]:
    return Call("scale", (number, wait_s), bool)


def resume_replica(name: str) -> Call[None]:
    return Call("resume_replica", (name,), type(None))


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Encoded bytes of every image. Raises BadImage when a file cannot be read."""
    return tuple(_read(image) for image in images)


def _read_visual(visual: Visual) -> bytes | tuple[tuple[bytes, ...], tuple[float, ...]]:
    """An image's bytes, or a video's frames and times. Raises BadImage, and BadRequest for wrong times."""
    if not isinstance(visual, Video):
        return _read(visual)
    visual.check()
    return read_images(visual.frames), tuple(map(float, visual.times))


def _num_bytes(visual: bytes | tuple[tuple[bytes, ...], tuple[float, ...]]) -> int:
    return len(visual) if isinstance(visual, bytes) else sum(map(len, visual[0]))


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


def _text_args(
    call_id: int,
    question: str,
    images: Sequence[Visual],
    adapter: Adapter | None,
    max_latency_s: float | None,
    max_ttft_s: float | None,
    priority: int,
    sampling: Mapping[str, Any],
) -> tuple[tuple[Any, ...], int]:
    encoded = tuple(_read_visual(one) for one in images)
    options = dict(sampling)
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    pairs = sampling_pairs(sampling_params(options))
    name = adapter_name(adapter) if isinstance(adapter, Mapping) else adapter
    args = (call_id, question, encoded, name, pairs, max_latency_s, max_ttft_s, priority)
    return args, sum(map(_num_bytes, encoded))


def _read(image: Image) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImage(f"cannot read image {os.fspath(image)!r}: {why}") from error
