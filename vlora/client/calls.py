"""What a client may ask, as data: the sync and the asyncio client share every call and differ only in how they wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from vlora.client.values import Answer, HeadResult, StreamPart, sampling_pairs, sampling_params
from vlora.errors import BadImage
from vlora.types import AdapterStatus, EngineStats

T = TypeVar("T")

Image = bytes | bytearray | memoryview | str | os.PathLike[str]
"""An encoded image (JPEG, PNG, ...), or the path of one."""


class Call(NamedTuple, Generic[T]):
    """One exposed method and its values. num_bytes: how much of the message is images."""

    name: str
    args: tuple[Any, ...]
    returns: type[T]
    num_bytes: int = 0


def generate(
    call_id: int,
    question: str,
    images: Sequence[Image],
    adapter: str | None,
    max_latency_s: float | None,
    sampling: Mapping[str, Any],
) -> Call[Answer]:
    args, num_bytes = _text_args(call_id, question, images, adapter, max_latency_s, sampling)
    return Call("generate", args, Answer, num_bytes)


def open_stream(
    call_id: int,
    question: str,
    images: Sequence[Image],
    adapter: str | None,
    max_latency_s: float | None,
    sampling: Mapping[str, Any],
) -> Call[None]:
    args, num_bytes = _text_args(call_id, question, images, adapter, max_latency_s, sampling)
    return Call("open_stream", args, type(None), num_bytes)


def next_part(call_id: int, wait_s: float) -> Call[StreamPart]:
    return Call("next_part", (call_id, wait_s), StreamPart)


def cancel(call_id: int) -> Call[None]:
    return Call("cancel", (call_id,), type(None))


def ask_head(
    call_id: int, images: Sequence[Image], adapter: str, head: str, max_latency_s: float | None
) -> Call[HeadResult]:
    encoded = read_images(images)
    return Call("ask_head", (call_id, encoded, adapter, head, max_latency_s), HeadResult, sum(map(len, encoded)))


def adapters() -> Call[tuple[AdapterStatus, ...]]:
    return Call("adapters", (), tuple[AdapterStatus, ...])


def load_adapter(name: str, path: str | os.PathLike[str]) -> Call[AdapterStatus]:
    return Call("load_adapter", (name, os.fspath(path)), AdapterStatus)


def unload_adapter(name: str) -> Call[None]:
    return Call("unload_adapter", (name,), type(None))


def pin_adapter(name: str, pinned: bool) -> Call[AdapterStatus]:
    return Call("pin_adapter", (name, pinned), AdapterStatus)


def stats() -> Call[EngineStats]:
    return Call("stats", (), EngineStats)


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Encoded bytes of every image. Raises BadImage when a file cannot be read."""
    return tuple(_read(image) for image in images)


def _text_args(
    call_id: int,
    question: str,
    images: Sequence[Image],
    adapter: str | None,
    max_latency_s: float | None,
    sampling: Mapping[str, Any],
) -> tuple[tuple[Any, ...], int]:
    encoded = read_images(images)
    options = dict(sampling)
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    pairs = sampling_pairs(sampling_params(options))
    return (call_id, question, encoded, adapter, pairs, max_latency_s), sum(map(len, encoded))


def _read(image: Image) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise BadImage(f"cannot read image {os.fspath(image)!r}: {error.strerror}") from error
