"""Decoding of client images to pixels; size limits are checked before decoding."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from vlora.config import ServerConfig
from vlora.errors import BadImage, TooLarge
from vlora.models.vision.images import FORMATS, open_image, upright_rgb

# Pillow warns above a fixed number of pixels; the server enforces its own limit instead.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class RawImage(NamedTuple):
    """Raw pixels: rows from the top, three bytes per pixel (red, green, blue)."""

    pixels: bytes
    height: int
    width: int

    def check(self, config: ServerConfig) -> None:
        """Raises BadImage when size and bytes do not match, TooLarge above the server's limit."""
        if self.height < 1 or self.width < 1:
            raise BadImage(f"a raw image has size {self.width}x{self.height}; both sides must be at least 1")
        if max(self.height, self.width) > config.max_image_pixels:  # may be arbitrarily large, so the message omits it
            raise TooLarge(f"a raw image has a side of over {config.max_image_pixels} pixels, this server's limit")
        if self.height * self.width > config.max_image_pixels:
            raise TooLarge(
                f"a raw image is {self.width}x{self.height}, {self.height * self.width} pixels; this server takes at "
                f"most {config.max_image_pixels}"
            )
        if len(self.pixels) != 3 * self.height * self.width:
            raise BadImage(
                f"a raw image of {self.width}x{self.height} pixels must have {3 * self.height * self.width} bytes "
                f"(RGB, one byte per channel); got {len(self.pixels)}"
            )


def decode_images(encoded: Sequence[bytes | RawImage], config: ServerConfig) -> list[Image.Image]:
    """Decode to RGB, rotated upright by EXIF; of an animation, the first frame.

    Raises TooLarge above a limit of the server, BadImage for invalid bytes. Messages count images from 1.
    """
    check_number(encoded, config)
    opened = [_open(image, number, config) for number, image in enumerate(encoded, 1)]
    pixels = sum(image.width * image.height for image in opened)
    if pixels > config.max_request_pixels:
        raise TooLarge(
            f"the request's {len(opened)} images have {pixels} pixels together; this server takes at most "
            f"{config.max_request_pixels}"
        )
    return [_load(image, number) for number, image in enumerate(opened, 1)]


def check_number(images: Sequence[object], config: ServerConfig) -> None:
    """Raises TooLarge when a request has more images than the server takes."""
    if len(images) > config.max_images:
        raise TooLarge(f"the request has {len(images)} images; this server takes at most {config.max_images}")


def _open(encoded: bytes | RawImage, number: int, config: ServerConfig) -> Image.Image:
    """Read the header only: format and size."""
    if isinstance(encoded, RawImage):
        encoded.check(config)
        return Image.frombuffer("RGB", (encoded.width, encoded.height), encoded.pixels, "raw", "RGB", 0, 1)
    if len(encoded) > config.max_image_bytes:
        raise TooLarge(f"image {number} has {len(encoded)} bytes; this server takes at most {config.max_image_bytes}")
    if not encoded:
        raise BadImage(f"image {number} is empty")
    try:
        image = open_image(io.BytesIO(encoded))
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow's hard limit
        raise TooLarge(
            f"image {number} has over {most} pixels; this server takes at most {min(most, config.max_image_pixels)}"
        ) from error
    except Exception as error:  # Pillow's decoders raise many error types on broken input
        why = f": {error}" if isinstance(error, ValueError) else ""
        message = f"image {number} ({len(encoded)} bytes) is broken or not one of {', '.join(FORMATS)}{why}"
        raise BadImage(message) from error
    pixels = image.width * image.height
    if pixels > config.max_image_pixels:
        raise TooLarge(
            f"image {number} is {image.width}x{image.height}, {pixels} pixels; this server takes at most "
            f"{config.max_image_pixels}"
        )
    return image


def _load(image: Image.Image, number: int) -> Image.Image:
    try:
        return upright_rgb(image)
    except Exception as error:
        raise BadImage(f"image {number} ({image.format}, {image.width}x{image.height}) is broken: {error}") from error
