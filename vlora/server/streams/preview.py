"""A stream's last answered frame with its answer, drawn only while a viewer requests it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlora.client.values import FrameResult
from vlora.config import ServerConfig
from vlora.server.media.image_decoding import RawImage, decode_images
from vlora.types import FoundBox

_WIDTH, _HEIGHT, _BAR = 480, 280, 40  # picture size, and the bar below it for the answer
_FONT = 26.0
_COLOUR = (255, 220, 80)
_VIEWED_S = 5.0  # frames are drawn for this long after a request
_INTERVAL_S = 0.5


class Preview:
    """Drawing takes a few milliseconds in a thread: at most two frames per second, and only while viewed."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._read_at = self._drawn_at = -_VIEWED_S
        self._picture: tuple[int, bytes] | None = None

    def read(self) -> tuple[int, bytes] | None:
        """The frame's number and its picture as JPEG; None until the next frame is answered."""
        now = self._loop.time()
        if now - self._read_at > _VIEWED_S:
            self._picture = None  # the picture is outdated after a pause of requests
        self._read_at = now
        return self._picture

    async def update(self, images: Sequence[bytes | RawImage], result: FrameResult) -> None:
        """Draw the last image of an answered frame, unless the preview is not viewed or the last picture is recent."""
        now = self._loop.time()
        if now - self._read_at > _VIEWED_S or now - self._drawn_at < _INTERVAL_S:
            return
        self._drawn_at = now
        self._picture = result.number, await asyncio.to_thread(draw, images[-1], result, self._config)


def draw(image: bytes | RawImage, result: FrameResult, config: ServerConfig) -> bytes:
    """A small JPEG of an answered frame, its answers below the picture. Raises BadImage."""
    (whole,) = decode_images((image,), config)
    picture = ImageOps.contain(whole, (_WIDTH, _HEIGHT))
    heads = [each.answer for each in result.answers if each.answer is not None]
    _draw_boxes(picture, [box for head in heads for box in head.boxes], picture.width / whole.width)
    drawn = Image.new("RGB", (_WIDTH, _HEIGHT + _BAR))
    drawn.paste(picture, ((_WIDTH - picture.width) // 2, (_HEIGHT - picture.height) // 2))
    labels = [each.label for each in result.answers if each.label is not None]
    if len(labels) == len(heads) == 1:
        labels = [f"{heads[0].label}  {heads[0].confidence:.0%}"]
    text = f"{'; '.join(labels)}  {result.latency_s * 1e3:.0f} ms"
    font = ImageFont.load_default(_FONT if len(labels) == 1 else _FONT / 2)
    ImageDraw.Draw(drawn).text((_WIDTH / 2, _HEIGHT + _BAR / 2), text, fill="white", font=font, anchor="mm")
    stream = io.BytesIO()
    drawn.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def _draw_boxes(picture: Image.Image, boxes: Sequence[FoundBox], scale: float) -> None:
    """The boxes of the last image."""
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    last = max((box.image for box in boxes), default=0)
    for box in boxes:
        if box.image == last:
            edges = [edge * scale for edge in (box.left, box.top, box.right, box.bottom)]
            pen.rectangle(edges, outline=_COLOUR, width=2)
            pen.text((edges[0] + 3, max(0, edges[1] - 17)), f"{box.label} {box.score:.0%}", fill=_COLOUR, font=font)
