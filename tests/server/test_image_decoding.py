"""Accepted images and their decoded form."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from tests.server.running import png
from vlora.config import ServerConfig
from vlora.errors import BadImage, TooLarge
from vlora.server.media.image_decoding import decode_images

CONFIG = ServerConfig(max_image_bytes=100_000, max_image_pixels=10_000, max_request_pixels=15_000, max_images=3)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG header that declares this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


NOISE = saved(Image.effect_noise((64, 64), 50), "PNG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_supported_formats_become_rgb(kind: str) -> None:
    (image,) = decode_images([png(200, kind=kind)], CONFIG)
    assert image.mode == "RGB" and image.size == (8, 8)
    pixel = image.getpixel((4, 4))
    assert isinstance(pixel, tuple) and all(abs(value - 200) <= 2 for value in pixel)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        png()[:40],
        png(kind="JPEG")[:150],
        NOISE[: len(NOISE) // 2],
        b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
        bomb(0, 10),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "half a png", "png of zeros", "0 x 10"],
)
def test_bytes_that_are_not_an_image_are_refused(data: bytes) -> None:
    with pytest.raises(BadImage, match="image 2"):
        decode_images([png(), data], CONFIG)


def test_limits_are_checked_before_decoding() -> None:
    with pytest.raises(TooLarge, match="image 1 has 100001 bytes; this server takes at most 100000"):
        decode_images([b"x" * 100_001], CONFIG)
    with pytest.raises(
        TooLarge, match=rf"image 1 has over \d+ pixels; this server takes at most {CONFIG.max_image_pixels}"
    ):
        decode_images([bomb(20_000, 20_000)], CONFIG)
    with pytest.raises(TooLarge, match="image 1 is 101x100, 10100 pixels; this server takes at most 10000"):
        decode_images([bomb(101, 100)], CONFIG)
    with pytest.raises(TooLarge, match="2 images have 20000 pixels together"):
        decode_images([bomb(100, 100)] * 2, CONFIG)
    with pytest.raises(TooLarge, match="has 4 images; this server takes at most 3"):
        decode_images([png()] * 4, CONFIG)


def test_unusual_modes_and_orientation() -> None:
    sixteen_bits = Image.new("I;16", (4, 4), 128 * 256)
    cmyk = Image.new("CMYK", (4, 4), (0, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    tall = Image.new("RGB", (4, 8), (255, 0, 0))
    animated = saved(Image.new("P", (4, 4), 0), "GIF", save_all=True, append_images=[Image.new("P", (4, 4), 1)])
    (gray,) = decode_images([saved(sixteen_bits, "PNG")], CONFIG)
    assert gray.getpixel((0, 0)) == (128, 128, 128)
    (white,) = decode_images([saved(cmyk, "JPEG")], CONFIG)
    pixel = white.getpixel((0, 0))
    assert white.mode == "RGB" and isinstance(pixel, tuple) and min(pixel) > 250
    (turned,) = decode_images([saved(tall, "JPEG", exif=exif)], CONFIG)
    assert turned.size == (8, 4)
    (first,) = decode_images([animated], CONFIG)
    assert first.size == (4, 4) and first.mode == "RGB"
