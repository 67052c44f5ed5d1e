"""Accepted images and their decoded form."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fusion.data.frames import Picture
from tests.server.running import png
from vlora.config import ServerConfig
from vlora.errors import BadImage, TooLarge
from vlora.server.media.image_decoding import decode_images
from vlora.training.samples import read_picture

CONFIG = ServerConfig(max_image_bytes=100_000, max_image_pixels=10_000, max_request_pixels=15_000, max_images=3)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG header that declares this many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


NOISE = saved(Image.effect_noise((64, 64), 50), "PNG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_supported_formats_become_rgb(kind: str) -> None:
    (image,) = decode_images([png(200, kind=kind)], CONFIG)
    assert image.mode == "RGB" and image.size == (8, 8)
    pixel = image.getpixel((4, 4))
    assert isinstance(pixel, tuple) and all(abs(value - 200) <= 2 for value in pixel)


NOT_IMAGES = {
    "empty": b"",
    "text": b"no image",
    "cut png": png()[:40],
    "cut jpeg": png(kind="JPEG")[:150],
    "half a png": NOISE[: len(NOISE) // 2],
    "png of zeros": b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
    "0 x 10": bomb(0, 10),
}


@pytest.mark.parametrize("name", NOT_IMAGES)
def test_bytes_that_are_not_an_image_are_refused(name: str) -> None:
    with pytest.raises(BadImage, match="image 2"):
        decode_images([png(), NOT_IMAGES[name]], CONFIG)


def test_limits_are_checked_before_decoding() -> None:
    most = CONFIG.max_image_pixels
    for images, message in (
        ([b"x" * 100_001], "image 1 has 100001 bytes; this server takes at most 100000"),
        ([bomb(20_000, 20_000)], rf"image 1 has over \d+ pixels; this server takes at most {most}"),
        ([bomb(2**31 - 1, 1)], rf"image 1 .* pixels; this server takes at most {most}"),
        ([bomb(101, 100)], "image 1 is 101x100, 10100 pixels; this server takes at most 10000"),
        ([bomb(100, 100)] * 2, "2 images have 20000 pixels together"),
        ([png()] * 4, "has 4 images; this server takes at most 3"),
    ):
        with pytest.raises(TooLarge, match=message):
            decode_images(images, CONFIG)


def test_images_with_flipped_bytes_are_decoded_or_refused() -> None:
    source = random.Random(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        whole = png(size=(24, 24), kind=kind)
        for _ in range(12):
            data = bytearray(whole)
            for _ in range(source.randint(1, 6)):
                data[source.randrange(len(data))] = source.randrange(256)
            with contextlib.suppress(BadImage, TooLarge):
                decode_images([bytes(data)], CONFIG)


def png_of(rows: np.ndarray, color: int, bits: int = 16, transparent: Sequence[int] = ()) -> bytes:
    """A PNG of one row of samples [n, channels], written by hand, since Pillow writes few of these kinds."""
    data = rows.astype(">u2").tobytes()
    if bits < 8:
        data = np.packbits([int(digit) for (value,) in rows for digit in f"{value:0{bits}b}"]).tobytes()
    header = struct.pack(">IIBBBBB", len(rows), 1, bits, color, 0, 0, 0)
    body = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    body += chunk(b"IDAT", zlib.compress(b"\0" + data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def tiff_of(rows: np.ndarray, photometric: int = 1, **more: int) -> bytes:
    """A TIFF of one row of samples [n] or [n, channels]. more: tags by number, as `t340`, of one number each."""
    order, form = (">" if rows.dtype.byteorder == ">" else "<"), {"u": 1, "i": 2, "f": 3}[rows.dtype.kind]
    channels = rows.shape[1] if rows.ndim == 2 else 1
    tags = {256: len(rows), 257: 1, 258: rows.itemsize * 8, 259: 1, 262: photometric, 277: channels, 278: 1}
    tags |= {279: rows.nbytes, 339: form} | {int(name[1:]): value for name, value in more.items()}
    at = 8 + 2 + 12 * (len(tags) + 1) + 4
    entries = b""
    for tag, value in sorted((tags | {273: at + 8 * channels}).items()):
        if tag == 258 and channels > 1:
            entries += struct.pack(order + "HHII", tag, 3, channels, at)
        else:
            entries += struct.pack(order + "HHII", tag, 4, 1, value)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, len(tags) + 1)
    bits = struct.pack(order + f"{4 * channels}H", *[tags[258]] * 4 * channels)
    return head + entries + struct.pack(order + "I", 0) + bits + rows.tobytes()


CLEAR = np.zeros((20, 60, 4), np.uint8)  # black on black, shown by its transparency only
CLEAR[5:15, 10:50, 3] = 255
DRAWN = np.where(CLEAR[..., 3] > 0, 0, 255)
WIDE = np.arange(256)
FIRST = [Image.new("RGBA", (2, 1), color) for color in ((0, 0, 0, 0), (0, 0, 255, 255))]
ANIMATED = {"save_all": True, "append_images": FIRST[1:]}
FLOATS = np.array([-5, 0, np.nan, np.inf, 5, -np.inf], "f4")


@pytest.mark.parametrize(
    ("data", "grey"),
    {
        # Transparency is composed over white.
        "RGBA": (saved(Image.fromarray(CLEAR), "PNG"), DRAWN),
        "RGBA WebP": (saved(Image.fromarray(CLEAR), "WEBP", lossless=True, exact=True), DRAWN),
        "RGBA TIFF": (saved(Image.fromarray(CLEAR), "TIFF"), DRAWN),
        "LA": (saved(Image.fromarray(CLEAR[..., [0, 3]]), "PNG"), DRAWN),
        "palette": (saved(Image.fromarray(CLEAR[..., 3]).convert("P"), "PNG", transparency=0), 255),
        "half": (saved(Image.new("RGBA", (2, 1), (64, 64, 64, 128)), "PNG"), 159),
        "premultiplied": (tiff_of(np.array([[64, 64, 64, 128]], "u1"), 2, t338=1), 191),
        "grey of 1 bit": (png_of(np.array([[0], [1]]), 0, 1, [0]), [[255, 255]]),
        "grey of 2 bits": (png_of(np.array([[0], [1], [2], [3]]), 0, 2, [1]), [[0, 255, 170, 255]]),
        "grey of 4 bits": (png_of(np.array([[0], [5], [10], [15]]), 0, 4, [5]), [[0, 255, 170, 255]]),
        "grey of 16 bits": (png_of(np.array([[0], [300], [301]]), 0, 16, [300]), [[0, 255, 1]]),
        "RGB of 16 bits": (png_of(np.array([[4660] * 3, [514] * 3]), 2, 16, [4660] * 3), [[255, 2]]),
        "RGBA of 16 bits": (png_of(np.array([[0, 0, 0, 0], [0, 0, 0, 65535]]), 6), [[255, 0]]),
        "LA of 16 bits": (png_of(np.array([[0, 0], [0, 65535]]), 4), [[255, 0]]),
        **{f"animated {kind}": (saved(FIRST[0], kind, **ANIMATED), 255) for kind in ("GIF", "WEBP", "PNG")},
        # Samples of more than 8 bits are scaled from the range that the file states, or from their own.
        "uint16": (tiff_of((WIDE * 257).astype("<u2")), [WIDE]),
        "uint16, high byte first": (tiff_of((WIDE * 257).astype(">u2")), [WIDE]),
        "uint16 PNG": (png_of(WIDE[:, None] * 257, 0), [WIDE]),
        "uint16, WhiteIsZero": (tiff_of((65535 - WIDE * 257).astype("<u2"), 0), [WIDE]),
        "uint16 of a stated range": (tiff_of(np.array([0, 2048, 4095], "<u2"), t340=0, t341=4095), [[0, 128, 255]]),
        "int16": (tiff_of((WIDE * 100 - 9000).astype("<i2")), [WIDE]),
        "int32": (tiff_of((WIDE * 257).astype("<i4")), [WIDE]),
        "uint32": (tiff_of(np.array([0, 2**31, 2**32 - 1], "<u4")), [[0, 128, 255]]),
        "int8": (tiff_of(np.array([-128, -1, 127], "i1")), [[0, 127, 255]]),
        "float": (tiff_of((WIDE / 255).astype("<f4")), [WIDE]),
        "kelvin": (tiff_of((280 + WIDE / 10).astype(">f4")), [WIDE]),
        "float, WhiteIsZero": (tiff_of((WIDE / 255).astype("<f4"), 0), [255 - WIDE]),
        "not finite": (tiff_of(FLOATS), [[0, 128, 0, 255, 255, 0]]),
        "constant": (tiff_of(np.full(3, 7, "<f4")), 0),
        # Others.
        "CMYK": (saved(Image.new("CMYK", (2, 1), (0, 0, 0, 55)), "TIFF"), 200),
        "inverted CMYK": (saved(Image.new("CMYK", (8, 8), (0, 0, 0, 55)), "JPEG", quality=100), 200),
        "YCbCr": (saved(Image.new("YCbCr", (2, 1), (200, 128, 128)), "TIFF"), 200),
        "LAB": (tiff_of(np.array([[255, 0, 0], [137, 0, 0]], "u1"), 8), [[255, 128]]),
        "1 bit": (saved(Image.fromarray(CLEAR[..., 3]).convert("1"), "TIFF"), 255 - DRAWN),
    }.values(),
)
def test_every_kind_of_sample_becomes_the_grey_that_was_put_in(tmp_path: Path, data: bytes, grey: Any) -> None:
    """Serving, fusion and training decode to the same pixels."""
    (image,) = decode_images([data], CONFIG)
    served = np.asarray(image).astype(int)
    assert image.mode == "RGB" and np.abs(served - np.asarray(grey)[..., None]).max() <= 1
    (tmp_path / "a").write_bytes(data)
    assert np.array_equal(Picture(tmp_path / "a")[0], served)
    assert np.array_equal(np.asarray(read_picture(tmp_path / "a")), served)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_pictures_are_rotated_by_exif(tmp_path: Path, kind: str, orientation: int) -> None:
    stored = np.zeros((16, 32), np.uint8)
    stored[:8, :8] = 250
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(stored), kind, exif=exif)
    (image,) = decode_images([data], CONFIG)
    (tmp_path / "a").write_bytes(data)
    assert np.array_equal(Picture(tmp_path / "a")[0], np.asarray(image))
    flipped = {2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1], 5: stored.T}
    turned = {6: np.rot90(stored, -1), 7: stored[::-1, ::-1].T, 8: np.rot90(stored)}
    expected = (flipped | turned)[orientation]
    assert image.size == expected.shape[::-1] and np.abs(np.asarray(image)[..., 0] - expected.astype(int)).max() < 30


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            tiff_of(np.array([1, 2], "<f8")),
            r"samples of 64 bits \(photometric 1, format 3\) is not supported",
        ),
        (
            tiff_of(np.array([1, 2], ">u2"), 0),
            r"a TIFF with samples of 16 bits \(photometric 0, format 1\)",
        ),
        (tiff_of(np.full(2, np.nan, "<f4")), r"none of its 2 samples \(mode F\) is a finite number"),
    ],
)
def test_samples_that_cannot_be_shown_are_refused_with_their_kind(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=f"image 1 .*{message}"):
        decode_images([data], CONFIG)
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Picture(tmp_path / "a.tif")[0]
