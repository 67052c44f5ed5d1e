"""Supported image formats and image decoding, shared by serving and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


class Region(NamedTuple):
    """The part of an image that its tokens represent, in pixels."""

    left: float
    top: float
    width: float
    height: float


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode to RGB, rotated upright by EXIF; the first frame of an animation. Broken files raise any exception."""
    from PIL import ImageOps  # an engine without a front end needs no Pillow

    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # Scale 16 bits to 8 bits; a plain conversion would clip all values above 255.
        upright = upright.convert("I").point(lambda value: value / 256).convert("L")
    return upright.convert("RGB")


class Clip(NamedTuple):
    """A decoded video. times: of its frames, in seconds."""

    frames: Sequence[Image.Image]
    times: Sequence[float]
