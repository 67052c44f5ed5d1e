"""Accepted images, their decoded form, and images by URL: only from sources that the operator allows, within limits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import random
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from fusion.data.frames import Picture
from tests.processes import PATIENCE_S
from tests.server.running import png
from tests.sites import Page, Site, site
from vlora.config import ServerConfig
from vlora.errors import BadConfig, BadImage, BadRequest, TooLarge, VLoraError
from vlora.public_hosts import is_public
from vlora.server import images as image_sources
from vlora.server.images import ImageSources, RawImage, decode_images
from vlora.training.samples import read_picture
from vlora.types.video import Video, VideoFile

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


NOT_IMAGES = {
    "empty": b"",
    "text": b"no image",
    "cut png": png()[:40],
    "cut jpeg": png(kind="JPEG")[:150],
    "half a png": NOISE[: len(NOISE) // 2],
    "png of zeros": b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
    "0 x 10": bomb(0, 10),
}


def test_bytes_that_are_not_an_image_are_refused_and_limits_are_checked_before_decoding() -> None:
    for data in NOT_IMAGES.values():
        with pytest.raises(BadImage, match="image 2"):
            decode_images([png(), data], CONFIG)
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
        **{f"plain {kind}": (png(200, kind=kind), 200) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")},
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
def test_pictures_are_rotated_by_exif(tmp_path: Path, kind: str) -> None:
    stored = np.zeros((16, 32), np.uint8)
    stored[:8, :8] = 250
    turned = [stored[:, ::-1], stored[::-1, ::-1], stored[::-1], stored.T]
    turned += [np.rot90(stored, -1), stored[::-1, ::-1].T, np.rot90(stored)]
    for orientation, expected in enumerate(turned, 2):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = saved(Image.fromarray(stored), kind, exif=exif)
        (image,) = decode_images([data], CONFIG)
        (tmp_path / "a").write_bytes(data)
        assert np.array_equal(Picture(tmp_path / "a")[0], np.asarray(image))
        assert image.size == expected.shape[::-1], orientation
        assert np.abs(np.asarray(image)[..., 0] - expected.astype(int)).max() < 30, orientation


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiff_of(np.array([1, 2], "<f8")), r"samples of 64 bits \(photometric 1, format 3\) is not supported"),
        (tiff_of(np.array([1, 2], ">u2"), 0), r"a TIFF with samples of 16 bits \(photometric 0, format 1\)"),
        (tiff_of(np.full(2, np.nan, "<f4")), r"none of its 2 samples \(mode F\) is a finite number"),
    ],
)
def test_samples_that_cannot_be_shown_are_refused_with_their_kind(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=f"image 1 .*{message}"):
        decode_images([data], CONFIG)
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Picture(tmp_path / "a.tif")[0]


PICTURE = png()
VIDEO = (Path(__file__).parent / "reordered.mp4").read_bytes()
LOCAL = ("127.0.0.1",)
CONTENT = bytes(range(247, 256)) + b"\0"
BASE64 = base64.b64encode(CONTENT).decode()  # with + and / and padding


PAGES = {
    "/picture": Page(PICTURE),
    "/video": Page(VIDEO, "video/mp4"),
    "/text": Page(b"<html>", "text/html"),
    "/large": Page(b"x" * 2000),
    "/endless": Page(b"x" * 2000, sized=False),
    "/missing": Page(status=404),
    "/forever": Page(status=302, location="/forever"),
    **{f"/round/{number}": Page(status=302, location=f"/round/{number + 1}") for number in range(3)},
    "/round/3": Page(status=302, location="/picture"),
}


@pytest.fixture(scope="module")
def pages() -> Iterator[Site]:
    over = threading.Event()
    slow = Page(wait=lambda: over.wait(PATIENCE_S))

    def page(path: str) -> Page:
        if path == "/slow":
            return slow
        return PAGES.get(path) or Page(status=302, location=path.removeprefix("/to/"))

    with site(page) as found:
        yield found
        over.set()


def read(*urls: bytes | str, **settings: Any) -> list[bytes | RawImage]:
    async def main() -> list[bytes | RawImage]:
        sources = ImageSources(ServerConfig(max_image_bytes=1000, max_images=3, **settings))
        try:
            return await sources.read(urls)
        finally:
            await sources.close()

    return asyncio.run(main())


def read_video(url: str, **settings: Any) -> Video[RawImage]:
    async def main() -> Video[RawImage]:
        sources = ImageSources(ServerConfig(**{"max_video_bytes": 1000, **settings}))
        try:
            return await sources.frames(VideoFile(url, num_frames=2), 1, ())
        finally:
            await sources.close()

    return asyncio.run(main())


def both(*urls: Any, **settings: Any) -> None:
    """Read as an image, and as a video, which ends in the same way."""
    with pytest.raises(VLoraError) as refused:
        read_video(*urls, **settings)
    message = str(refused.value).replace("video", "image").replace("data:image/mp4", "data:image/png")
    try:
        read(*urls, **settings)
    except VLoraError as error:
        assert (type(error), str(error)) == (type(refused.value), message)
        raise


def test_allowed_hosts_are_fetched_and_redirects_followed(pages: Site) -> None:
    shown = read_video(pages.url("/to//video"), image_hosts=LOCAL, max_video_bytes=4000)
    assert [frame.height for frame in shown.frames] == [32, 32] and shown.times == pytest.approx([0, 3])
    assert read(b"own", pages.url("/picture"), pages.url("/round/1"), image_hosts=LOCAL) == [b"own", PICTURE, PICTURE]
    for _, headers in pages.requested:
        assert headers["Host"] == f"127.0.0.1:{pages.port}" and "Authorization" not in headers


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/text", BadImage, "image 1: '127.0.0.1' sent 'text/html'; Content-Type must be image/..."),
        ("/large", TooLarge, "image 1 has over 1000 bytes"),
        ("/endless", TooLarge, "image 1 has over 1000 bytes"),
        ("/video", TooLarge, "video 1 has over 1000 bytes"),
        ("/missing", BadImage, "cannot be fetched from '127.0.0.1': status 404"),
        ("/forever", BadImage, "more than 3 redirects"),
        ("/to/file:///etc/passwd", BadRequest, "unsupported URL scheme 'file'"),
        ("/to/http://10.0.0.1/", BadRequest, "does not fetch images from '10.0.0.1'"),
        ("/to/http://localhost/", BadRequest, "does not fetch images from 'localhost'"),
        ("/to///evil.example/x", BadRequest, "does not fetch images from 'evil.example'"),
    ],
)
def test_the_response_of_a_host_is_checked(pages: Site, path: str, error: type[VLoraError], message: str) -> None:
    with pytest.raises(error, match=message):
        of_kind: dict[str, Any] = {"/large": read, "/endless": read, "/video": read_video}
        of_kind.get(path, both)(pages.url(path), image_hosts=LOCAL)


PRIVATE_HOSTS = (
    *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254"),
    *("100.64.0.1", "[fe80::1]", "[fd00::1]", "224.0.0.1", "[ff02::1]"),
)


def test_public_hosts_only_refuses_every_form_of_a_private_address(
    pages: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_requests = len(pages.requested)
    for host in PRIVATE_HOSTS:
        with pytest.raises((BadRequest, BadImage), match=r"is not a public address|cannot resolve host|is invalid"):
            both(pages.url("/picture", host), image_hosts=("*",))
    assert len(pages.requested) == num_requests
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> Any:
        return await real(self, "127.0.0.1" if host == "evil" else host, port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    for target in ("http://10.0.0.1/", "http://localhost/picture", "//evil/x"):
        with pytest.raises(BadRequest, match="is not a public address"):
            both(pages.url(f"/to/{target}"), image_hosts=("*", *LOCAL))
    assert len(pages.requested) == num_requests + 2 * 3, "only the redirects themselves are fetched, not their targets"


def test_the_checked_address_is_used_for_the_connection(pages: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves first to a public address and later to a private one is resolved only once."""
    requested: list[str] = []

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        requested.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    with pytest.raises(BadRequest, match=r"'rebinding\.example' is not a public address"):
        both(pages.url("/picture", "rebinding.example"), image_hosts=("*",))
    assert requested == 2 * ["rebinding.example"]
    assert read(pages.url("/picture", "pictures.example"), image_hosts=("pictures.example",)) == [PICTURE]
    assert requested[2:3] == ["pictures.example"] and set(requested[3:]) <= {"127.0.0.1"}


NO_DATA = ("data:image/png,raw", "data:image/png;base64;charset=utf-8,QUJD", "data:image/png;base64")
INVALID = {
    "http://user:secret@127.0.0.1/x?key=secret": "a user name or password",
    "http://": "image 1: the URL has no host",
    **dict.fromkeys(("http://[::1", "http://127.0.0.1:99999/", "http://\x00/"), "the URL is invalid"),
    **dict.fromkeys(("ftp://127.0.0.1/x", "picture.png", ""), "unsupported URL"),
    **dict.fromkeys(NO_DATA, "invalid data URL"),
}


def test_invalid_urls_are_refused_and_not_repeated() -> None:
    for url, message in INVALID.items():
        with pytest.raises(BadRequest, match=message) as caught:
            both(url, image_hosts=LOCAL)
        assert "secret" not in str(caught.value)


DATA_URLS = [
    f"data:image/png;base64,{BASE64}",
    f"DATA:image/png;BASE64,{BASE64}",
    f"data:;base64,{BASE64}",  # no media type, and one of no image: the bytes decide
    f"data:text/plain;base64,{BASE64}",
    f"data:image/png;charset=utf-8;base64,{BASE64}",
    f"data:image/png; base64 ,{BASE64}",
    f"data:image/png;base\n64,{BASE64}",
    f" \ndata:image/png;base64,{BASE64}\n",  # the URL parser strips blanks and removes line ends
    "data:image/png;base64," + "\r\n".join(BASE64),
    "data:image/png;base64," + " \t\n\f\r".join(BASE64),
    f"data:image/png;base64,{BASE64.rstrip('=')}",
    f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3d')}",
    f"data:image/png;base64,{BASE64.replace('A', '%41%0A%20')}",
    f"data:image/png;base64,{BASE64[:-3]}P==",  # bits after the last byte are dropped
    f"data:image/png;base64,{BASE64}#fragment",
    "data:image/png," + "".join(f"%{byte:02X}" for byte in CONTENT),
]
NOT_BASE64 = {
    BASE64.replace("+", "-"): r"it has '-' at index \d+; use \+ and / in place of - and _",
    BASE64.rstrip("=") + "=": "it has '=' at index 14; padding is complete or absent",
    BASE64 + "====": "'=' at index",
    "QQ==QQ==": "'=' at index 2",
    BASE64[:5]: "5 characters cannot be decoded; it may be truncated",
    "QU*D": r"it has '\*' at index 2",
    **dict.fromkeys(("QUéD", "QU\udc80D"), "index 2"),
    "QU%ZZD": "it has '%' at index 2",
}


def test_data_urls_are_read_as_browsers_read_them() -> None:
    """By the data URL processor of the Fetch standard, with the forgiving base64 of the Infra standard."""
    for url in DATA_URLS:
        assert read(url) == [CONTENT], url
    for text, message in NOT_BASE64.items():
        with pytest.raises(BadImage, match=f"image 1 is not base64: .*{message}"):
            read(f"data:image/png;base64,{text}")


def test_nothing_is_fetched_or_read_unless_the_operator_allows_it(pages: Site, tmp_path: Path) -> None:
    num_requests = len(pages.requested)
    with pytest.raises(BadRequest, match=r"does not fetch images from '127.0.0.1'.* --image-hosts"):
        both(pages.url("/picture"))
    with pytest.raises(BadRequest, match=r"does not read files.* --image-folder"):
        both(f"file://{tmp_path}/x.png")
    with pytest.raises(TooLarge, match="has 4 images"):
        read(*[pages.url("/picture")] * 4, image_hosts=LOCAL)
    assert len(pages.requested) == num_requests


def test_an_unresponsive_host_times_out(pages: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadImage, match=r"cannot be fetched from '127\.0\.0\.1': ConnectError"):
        read("http://127.0.0.1:1/", image_hosts=LOCAL)
    monkeypatch.setattr(image_sources, "FETCH_S", 0.2)
    with pytest.raises(BadImage, match=r"image 1 was not received from '127\.0\.0\.1' within 0\.2 s|Timeout"):
        read(pages.url("/slow"), image_hosts=LOCAL)


def test_files_are_read_from_the_allowed_folder_only(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PICTURE)
    (folder / "large.png").write_bytes(b"x" * 1001)
    (folder / "inside.png").symlink_to(folder / "a b.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    outside.write_bytes(PICTURE)
    os.mkfifo(folder / "pipe.png")
    allowed = {"image_folder": str(folder)}
    urls = (f"file://{folder}/a%20b.png", "file:a%20b.png", f"file://localhost{folder}/inside.png")
    assert read(*urls, **allowed) == [PICTURE] * 3
    with pytest.raises(TooLarge, match="image 1 has over 1000 bytes"):
        read("file:large.png", **allowed)
    names = ("../secret.png", "link.png", "loop.png", "pipe.png", ".", "none.png", "a\x00b", "x" * 5000)
    paths = (f"{outside}", f"{folder}/../secret.png", f"{folder}/%2e%2e/secret.png", "[broken", "/dev/zero")
    elsewhere = f"file://elsewhere{folder}/inside.png"
    for url in (*(f"file:{name}" for name in names), *(f"file://{path}" for path in paths), elsewhere):
        with pytest.raises(BadImage, match=r"^image 1: no such file in this server's image folder$"):
            both(url, **allowed)
    with pytest.raises(BadConfig, match="there is no such folder"):
        ServerConfig(image_folder=str(tmp_path / "none"))


NOT_PUBLIC = (
    *("fec0::1", "::7f00:1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "5f00::1"),
    *("2002:808:808::", "2001:0:7f00:1::", "4000::1", "::ffff:0:127.0.0.1", "fe80::5efe:7f00:1", "100.64.0.1"),
    *("2606:4700::5efe:7f00:1", "2606:4700::200:5efe:808:808", "192.88.99.1", "192.0.0.8", "192.0.0.9"),
    *("198.18.0.1", "168.63.129.16"),
)
PUBLIC = ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2a00:1450:4001:80b::200e")


def test_addresses_that_embed_others_are_not_public() -> None:
    assert [each for each in (*NOT_PUBLIC, *PUBLIC) if is_public(each)] == list(PUBLIC)


async def test_a_slow_host_does_not_block_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick, *others = hosts = [f"127.0.0.{number}" for number in range(1, 7)]
    sources = ImageSources(ServerConfig(image_hosts=tuple(hosts)))
    requested: list[str] = []

    async def send(client: httpx.AsyncClient, request: httpx.Request, *, stream: bool) -> httpx.Response:
        requested.append(str(request.url))
        await asyncio.sleep(0 if request.url.host == quick else PATIENCE_S)
        return httpx.Response(200, headers={"Content-Type": "image/png"}, stream=httpx.ByteStream(b"x"))

    monkeypatch.setattr(httpx.AsyncClient, "send", send)

    async def requests(count: int) -> list[str]:
        """The requests, when there are so many, and no further one follows."""
        while len(requested) < count:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return requested

    waiting = [asyncio.create_task(sources.read([f"http://{slow}/{each}"])) for each in range(40)]
    assert len(await requests(4)) == 4
    assert await sources.read([f"http://{quick}/a", f"http://{quick}/b"]) == [b"x", b"x"]
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # All of the 16 slots are free again.
    requested.clear()
    waiting = [asyncio.create_task(sources.read([f"http://{host}/"])) for host in others for _ in range(5)]
    assert sorted(await requests(16)) == sorted(f"http://{host}/" for host in others for _ in range(4))
    for each in waiting:
        each.cancel()
