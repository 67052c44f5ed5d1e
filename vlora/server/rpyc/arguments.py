"""The arguments of RPyC calls: values of any type, checked. All functions raise BadRequest for other values."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from vlora.errors import BadRequest
from vlora.server.media.image_decoding import RawImage
from vlora.types.video import Video
from vlora.wording import msgspec_errors

_MAX_WAIT_S = 30.0


def positional(call: str, args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The arguments of a call that takes `count` of them."""
    if len(args) != count:
        raise BadRequest(f"{call} takes {count} values; got {len(args)}")
    return args


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value of an argument of this type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec_errors.REFUSED as error:
        raise BadRequest(msgspec_errors.described(error, name, value)) from error


def bounded_wait_s(value: Any) -> float:
    """How long a call may wait."""
    wait_s: float = checked("wait_s", value, float)
    if not 0 <= wait_s < math.inf:
        raise BadRequest(f"wait_s is {wait_s}; it must be 0 or more, and finite")
    return min(wait_s, _MAX_WAIT_S)


def frame_images(value: Any) -> tuple[bytes | RawImage, ...]:
    """The images of a frame: encoded, or pixels with height and width."""
    if not isinstance(value, tuple):
        raise BadRequest("images must be a tuple of bytes or (bytes, height, width)")
    return tuple(image if isinstance(image, bytes) else RawImage(*_raw(image)) for image in value)


def _raw(value: Any) -> tuple[bytes, int, int]:
    if not isinstance(value, tuple) or [type(each) for each in value] != [bytes, int, int]:
        raise BadRequest("an image must be bytes or (bytes, height, width)")
    return value


def visuals(value: Any) -> tuple[bytes | Video[Any], ...]:
    """The encoded images and the videos of a question."""
    if not isinstance(value, tuple):
        raise BadRequest("images must be a tuple of bytes, one per image, and of (frames, times), one per video")
    return tuple(one if isinstance(one, bytes) else _video(one) for one in value)


def _video(value: Any) -> Video[Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise BadRequest("a video must be (frames, times), an image bytes")
    frames, times = value
    return Video(encoded_images(frames), checked("times", times, tuple[float, ...]))


def encoded_images(value: Any) -> tuple[bytes, ...]:
    """Encoded images."""
    if not isinstance(value, tuple) or not all(isinstance(image, bytes) for image in value):
        raise BadRequest("images must be a tuple of bytes, one per image")
    return value
