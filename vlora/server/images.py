"""Images and videos of requests: bytes, data URLs, files, hosts that the operator allows; decoded within limits."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import io
import os
import re
import stat
import sys
import tempfile
import urllib.parse
import warnings
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple
from weakref import WeakValueDictionary

import httpx
import msgspec
from PIL import Image

from vlora.config import ServerConfig
from vlora.errors import BadImage, BadRequest, OverCapacity, TooLarge, error_from_code
from vlora.models.vision.images import FORMATS, open_image, upright_rgb
from vlora.public_hosts import addresses_of, is_public, parse_url, request_to
from vlora.types.video import DecodeVideo, FrameReport, Video, VideoFile

ANY_PUBLIC_HOST = "*"

_CONTROLS = "".join(map(chr, range(33)))
_MAX_REDIRECTS = 3
_WEB_PORTS = (80, 443)
FETCH_S, FETCH_VIDEO_S = 10.0, 60.0
_MAX_CONNECTIONS = 16
_MAX_CONNECTIONS_OF_HOST = 4  # a slow host must leave room for the others
_MAX_DECODERS = 2
DECODER = (sys.executable, "-m", "vlora.server.streams.video_process")
# Containers that name no other files, as playlists do; one thread, as the cores belong to the engine.
_FOR_DECODERS = {
    "OPENCV_FFMPEG_CAPTURE_OPTIONS": "format_whitelist;mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif"
    "|protocol_whitelist;file",
    "OPENCV_VIDEOIO_PRIORITY_LIST": "FFMPEG",
    "OPENCV_FFMPEG_THREADS": "1",
}

# Pillow warns above a fixed number of pixels; the server enforces its own limit instead.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class _Source(NamedTuple):
    """What is read. most: bytes. number: of its kind in the request, from 1."""

    kind: Literal["image", "video"]
    most: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def form(self) -> str:
        return f"data:{'image/png' if self.kind == 'image' else 'video/mp4'};base64,..."

    def too_large(self) -> TooLarge:
        return TooLarge(f"{self} has over {self.most} bytes, which is this server's limit")


class ImageSources:
    """Reads encoded images and videos from their sources. Used from one event loop.

    A host named in `image_hosts` is trusted: it may be in a private network. `*` allows every other host with only
    public addresses. For each URL, redirects included, the address is resolved once, checked, and used for the
    connection. Messages name only hosts, because query strings may contain secrets.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._hosts = frozenset(host.lower() for host in config.image_hosts)
        self._folder = None if config.image_folder is None else Path(config.image_folder).resolve()
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._decoders = asyncio.Semaphore(_MAX_DECODERS)
        self._slots_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, images: Sequence[bytes | RawImage | str]) -> list[bytes | RawImage]:
        """The encoded bytes or raw pixels of every image, in order; a string is a URL.

        Raises TooLarge, BadImage for an unreadable image, BadRequest for a source that is not allowed. Messages count
        images from 1.
        """
        check_number(images, self._config)
        most, held = self._config.max_message_bytes, 0
        encoded: list[bytes | RawImage] = []
        for number, image in enumerate(images, 1):
            source = _Source("image", self._config.max_image_bytes, number)
            one = await self._read_url(image, source) if isinstance(image, str) else image
            encoded.append(one)
            held += len(one.pixels if isinstance(one, RawImage) else one)
            if held > most:
                raise TooLarge(f"the request's first {number} images have over {most} bytes, the limit of a request")
        return encoded

    async def frames(self, video: EncodedVideo, number: int, others: Sequence[object]) -> Video[RawImage]:
        """Frames of a video, decoded in a process of its own. Raises as `read`.

        number: of the video in the request, from 1. others: images of the request that count towards its limits.
        """
        config, content = self._config, video.content
        source = _Source("video", config.max_video_bytes, number)
        if isinstance(content, str):
            content = await self._read_url(content, source)
        held = sum(one.height * one.width for one in others if isinstance(one, RawImage))
        asked = DecodeVideo(
            video=VideoFile(None, video.fps, video.num_frames),
            max_frames=config.max_images - len(others),
            max_s=config.max_video_s,
            max_pixels=min(config.max_request_pixels, config.max_message_bytes // 3) - held,
        )
        async with self._decoders:
            with await asyncio.to_thread(_opened, content, source) as file:
                return await _decode(file, asked, source)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _read_url(self, url: str, source: _Source) -> bytes:
        url = url.strip(_CONTROLS)  # as browsers do
        match url.partition(":")[0].lower():
            case "data":
                return await asyncio.to_thread(_data_url, url, source)
            case "http" | "https":
                place = parse_url(url, str(source)).netloc.decode("ascii")
                # Waiting for a connection slot does not count towards the host's time limit.
                async with self._slots_of.setdefault(place, asyncio.Semaphore(_MAX_CONNECTIONS_OF_HOST)), self._slots:
                    return await self._fetch(url, source)
            case "file":
                return await asyncio.to_thread(self._read_file, url, source)
        raise BadRequest(
            f"{source}: unsupported URL; send a data URL ({source.form}), or an http, https or file URL that the "
            "operator allows"
        )

    # -- http ---------------------------------------------------------------------------------------------------------

    async def _fetch(self, url: str, source: _Source) -> bytes:
        host, limit_s = "the host", FETCH_S if source.kind == "image" else FETCH_VIDEO_S
        try:
            async with asyncio.timeout(limit_s):
                for _ in range(_MAX_REDIRECTS + 1):
                    target = parse_url(url, str(source))
                    host = target.host
                    response = await self._get(target, await self._address(target, source), source)
                    try:
                        if not response.has_redirect_location:
                            return await self._body(response, host, source)
                        url = str(target.join(response.headers["location"]))
                    finally:
                        await response.aclose()
        except TimeoutError as error:
            raise BadImage(f"{source} was not received from {host!r} within {limit_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadImage(f"{source} cannot be fetched from {host!r}: {type(error).__name__}") from error
        raise BadImage(f"{source}: more than {_MAX_REDIRECTS} redirects, the last to {host!r}")

    async def _get(self, target: httpx.URL, address: str, source: _Source) -> httpx.Response:
        if self._client is None:
            limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=0)
            # A proxy from the environment would connect to an unchecked address.
            self._client = httpx.AsyncClient(trust_env=False, timeout=FETCH_S, limits=limits)
        headers = {"Accept": f"{source.kind}/*", "Accept-Encoding": "identity"}
        request = self._client.build_request("GET", **request_to(address, target, headers))
        return await self._client.send(request, stream=True)

    async def _body(self, response: httpx.Response, host: str, source: _Source) -> bytes:
        if response.status_code != 200:
            raise BadImage(f"{source} cannot be fetched from {host!r}: status {response.status_code}")
        kind = response.headers.get("content-type", "nothing").partition(";")[0].strip().lower()
        if not kind.startswith(f"{source.kind}/"):
            raise BadImage(f"{source}: {host!r} sent {kind!r}; Content-Type must be {source.kind}/...")
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > source.most:
            raise source.too_large()
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > source.most:
                raise source.too_large()
        return bytes(body)

    async def _address(self, target: httpx.URL, source: _Source) -> str:
        """The address to connect to. Raises BadRequest for a host that is not allowed, or not public."""
        host = target.host.lower()
        named = host in self._hosts
        if not named and ANY_PUBLIC_HOST not in self._hosts:
            raise BadRequest(
                f"{source}: this server does not fetch {source.kind}s from {host!r}; send a data URL ({source.form}), "
                "or have its operator allow the host with --image-hosts"
            )
        port = target.port or (443 if target.scheme == "https" else 80)
        try:
            addresses = await addresses_of(target)
        except (OSError, UnicodeError) as error:
            raise BadImage(f"{source}: cannot resolve host {host!r}") from error
        if not named and not all(map(is_public, addresses)):
            raise BadRequest(f"{source}: {host!r} is not a public address, and only public ones are allowed")
        if not named and port not in _WEB_PORTS:
            raise BadRequest(
                f"{source}: port {port} of {host!r} is not allowed; hosts that --image-hosts does not name must "
                "use port 80 or 443"
            )
        return addresses[0]

    # -- files --------------------------------------------------------------------------------------------------------

    def _read_file(self, url: str, source: _Source) -> bytes:
        if self._folder is None:
            raise BadRequest(
                f"{source}: this server does not read files; send a data URL ({source.form}), or have its operator "
                "allow a folder with --image-folder"
            )
        # The same message for every problem, so that it reveals nothing about files outside the folder.
        refused = BadImage(f"{source}: no such file in this server's image folder")
        try:
            parts = urllib.parse.urlsplit(url)
            path = (self._folder / urllib.parse.unquote(parts.path)).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._folder):
                raise refused
            # O_NONBLOCK avoids waiting for the other end of a pipe.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                data = file.read(source.most + 1)
        except (OSError, ValueError, RuntimeError) as error:
            raise refused from error
        if len(data) > source.most:
            raise source.too_large()
        return data


def _data_url(url: str, source: _Source) -> bytes:
    """The content of a data URL, as browsers read it: the Fetch standard's processor with its forgiving base64."""
    head, comma, data = url.partition(",")
    is_base64 = re.search(r"; *base64\s*$", re.sub(r"[\t\n\r]", "", head), re.IGNORECASE) is not None
    if not comma or not (is_base64 or "%" in data):  # without percent signs there is text, and no picture
        raise BadRequest(f"{source}: invalid data URL; the format is {source.form}")
    body = data.partition("#")[0].encode(errors="replace")
    body = urllib.parse.unquote_to_bytes(body) if b"%" in body else body
    if not is_base64:
        return body
    body = body.translate(None, b"\t\n\f\r ")
    if len(body) % 4 == 0:
        body = body.removesuffix(b"=").removesuffix(b"=")
    wrong = re.search(rb"[^A-Za-z0-9+/]", body)
    if wrong is not None:
        found, place = wrong.group().decode("latin-1"), wrong.start()
        why = "use + and / in place of - and _" if found in "-_" else "padding is complete or absent" * (found == "=")
        raise BadImage(f"{source} is not base64: it has {found!r} at index {place}{why and '; '}{why}")
    if len(body) % 4 == 1:
        raise BadImage(f"{source} is not base64: {len(body)} characters cannot be decoded; it may be truncated")
    return binascii.a2b_base64(body + b"=" * (-len(body) % 4))


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


EncodedVideo = VideoFile[bytes | str | Path]
"""A video's bytes, its URL, or an uploaded file."""


def _opened(content: bytes | Path, source: _Source) -> IO[bytes]:
    """A file with the content. Raises TooLarge, OverCapacity."""
    try:
        file: IO[bytes] = content.open("rb") if isinstance(content, Path) else tempfile.TemporaryFile()  # noqa: SIM115
        if isinstance(content, bytes):
            file.write(content)
        if file.seek(0, os.SEEK_END) > source.most:
            file.close()
            raise source.too_large()
        return file
    except OSError as error:
        raise OverCapacity(f"{source} cannot be kept for its decoder: {error.strerror}; try again later") from error


async def _decode(file: IO[bytes], asked: DecodeVideo, source: _Source) -> Video[RawImage]:
    """The frames that a process decodes, which ends with this call. Raises TooLarge, BadImage."""
    # The server's own secrets are not for decoders.
    variables = {**{name: os.environ[name] for name in os.environ if name[:6] != "VLORA_"}, **_FOR_DECODERS}
    process = await asyncio.create_subprocess_exec(
        *DECODER, msgspec.json.encode(asked), stdin=file, stdout=PIPE, stderr=DEVNULL, env=variables
    )
    output = process.stdout
    assert output is not None
    times: list[float] = []
    frames: list[RawImage] = []
    try:
        while (report := msgspec.json.decode(await output.readline(), type=FrameReport)).error is None:
            if not report.height:
                return Video(frames, times)
            pixels = await output.readexactly(3 * report.height * report.width)
            frames.append(RawImage(pixels, report.height, report.width))
            times.append(report.time_s)
        raise error_from_code(report.error.code, f"{source}: {report.error.message}")
    except (msgspec.DecodeError, asyncio.IncompleteReadError) as error:
        raise BadImage(f"{source} cannot be decoded: its decoder crashed; the file may be broken") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # `wait` does not end while its reader is paused


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
