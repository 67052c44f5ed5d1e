"""Supported image formats and image decoding: the same pixels in serving, training and fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT, _LOWEST, _HIGHEST = 258, 262, 339, 340, 341  # TIFF 6.0
_UNSIGNED = 1


class Region(NamedTuple):
    """The part of an image that its tokens represent, in pixels."""

    left: float
    top: float
    width: float
    height: float


def open_image(source: Path | IO[bytes]) -> Image.Image:
    """Read the header only. Broken files raise any exception, those of an unsupported kind ValueError."""
    from PIL import Image, TiffImagePlugin, UnidentifiedImageError  # an engine without a front end needs no Pillow

    try:
        image = Image.open(source, formats=FORMATS)
        # Without a name the file is not mapped into memory, where Pillow confuses the rows of a TIFF that EXIF rotates.
        image.filename = ""
        return image
    except UnidentifiedImageError as error:
        with open(source, "rb") if isinstance(source, Path) else nullcontext(source) as file:
            file.seek(0)
            head = file.read(8)
            if head[:4] not in (b"II*\0", b"MM\0*"):
                raise
            tags = TiffImagePlugin.ImageFileDirectory_v2(head)
            file.seek(tags.next)
            tags.load(file)
        kind = f"photometric {_number(tags, _PHOTOMETRIC, 0)}, format {_number(tags, _SAMPLE_FORMAT, _UNSIGNED)}"
        raise ValueError(f"a TIFF with samples of {_number(tags, _BITS, 1)} bits ({kind}) is not supported") from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode to RGB of 8 bits, rotated upright by EXIF; the first frame of an animation. Broken files raise any
    exception, pictures without a finite sample ValueError.

    Transparency is composed over white, as in a browser. Grey of more than 8 bits is scaled from its range, see
    `_scaled`. Colour profiles are not applied, as in transformers' image processors.
    """
    from PIL import Image, ImageCms, ImageOps

    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    key = _transparent_colour(image)  # the form of stored samples is known before decoding only
    image.load()
    picture = ImageOps.exif_transpose(image)
    if key is not None:
        picture.info["transparency"] = key
    if picture.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(picture, *profiles, outputMode="RGB")
        assert converted is not None, "it is not converted in place"
        picture = converted
    signed_bytes = picture.mode == "L" and tags.get(_SAMPLE_FORMAT) == (2,)
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16") or signed_bytes:
        picture = _scaled(picture, tags)
    if picture.has_transparency_data:
        straight = picture.convert("LA" if picture.mode == "La" else "RGBA").convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), straight)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _transparent_colour(image: Image.Image) -> int | tuple[int, ...] | None:
    """A PNG's transparent colour in the values that Pillow decodes to: of 2 and 4 bits scaled up, of 16 bits per
    channel without the lower half. None if it has none."""
    key = image.info.get("transparency")
    tiles = getattr(image, "tile", None)  # how the file stores its samples, until they are decoded
    raw = str(tiles[0].args) if image.format == "PNG" and tiles else ""
    if isinstance(key, int) and raw in ("L;2", "L;4"):
        return key * (85 if raw == "L;2" else 17)
    if isinstance(key, tuple) and raw.startswith("RGB;16"):
        return tuple(each >> 8 for each in key)
    return key if isinstance(key, int) and image.mode.startswith("I;16") else None


def _number(tags: Mapping[int, Any], tag: int, default: float) -> float:
    value = tags.get(tag, default)  # a tuple, or a number where the tag always has one
    return value[0] if isinstance(value, tuple) else value


def _scaled(picture: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Grey samples of more than 8 bits, or signed, to 0 to 255: from the range that a TIFF states (SMinSampleValue and
    SMaxSampleValue), else from all values of an unsigned integer of up to 16 bits, else from the picture's own least
    and largest value. A constant picture and NaN become black.

    Args:
        picture: With mode I, F or I;16, or L of signed bytes. A `transparency` in its info is the value of transparent
            pixels.
        tags: Of a TIFF; empty for other formats.
    """
    import numpy as np
    from PIL import Image

    samples = np.asarray(picture)
    if picture.mode == "I" and _number(tags, _SAMPLE_FORMAT, 2) == _UNSIGNED:
        samples = samples.view(np.uint32)  # Pillow decodes it as signed, and signed bytes as unsigned
    elif picture.mode == "L":
        samples = samples.view(np.int8)
    low, high = (float(_number(tags, tag, np.nan)) for tag in (_LOWEST, _HIGHEST))
    if not -np.inf < low < high < np.inf and picture.mode.startswith("I;16"):
        low, high = 0.0, 2.0 ** _number(tags, _BITS, 16) - 1
    elif not -np.inf < low < high < np.inf:
        finite = samples[np.isfinite(samples)]
        if not finite.size:
            raise ValueError(f"none of its {samples.size} samples (mode {picture.mode}) is a finite number")
        low, high = float(finite.min()), float(finite.max())
    levels = np.zeros(samples.shape, np.uint8)
    for row, line in enumerate(samples if low < high else ()):  # by rows, since float64 takes much memory
        shares = np.clip((line.astype(np.float64) - low) / (high - low), 0, 1)
        if _number(tags, _PHOTOMETRIC, 1) == 0:  # WhiteIsZero, which Pillow inverts up to 8 bits only
            shares = 1 - shares
        levels[row] = np.rint(255 * np.nan_to_num(shares))
    grey = Image.fromarray(levels)
    if "transparency" in picture.info:
        grey.putalpha(Image.fromarray(np.where(samples == picture.info["transparency"], 0, 255).astype(np.uint8)))
    return grey


class Clip(NamedTuple):
    """A decoded video. times: of its frames, in seconds."""

    frames: Sequence[Image.Image]
    times: Sequence[float]
