"""Which picture files are read, and what their pixels are: the same for what is served and what is trained on."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


class Region(NamedTuple):
    """The part of a picture that its tokens show, in pixels."""

    left: float
    top: float
    width: float
    height: float


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode to RGB, turned upright by EXIF; the first frame of an animation. Broken files raise any kind of error."""
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # Sixteen bits to eight; a plain conversion would cut everything above 255 to white.
        upright = upright.convert("I").point(lambda value: value / 256).convert("L")
    return upright.convert("RGB")
