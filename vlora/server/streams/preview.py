"""A stream's last answered frame with the answer written on it, for as long as somebody looks."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlora.client.values import FrameResult
from vlora.config import ServerConfig
from vlora.server.media.image_decoding import RawImage, decode_images
from vlora.types import FoundBox

_WIDTH, _HEIGHT, _BAR = 480, 280, 40  # room for the picture, and below it for the answer
_COLOUR = (255, 220, 80)
_LOOKED_S = 5.0  # how long after a look frames are still drawn
_APART_S = 0.5


class LastFrame:
    """Drawing costs a few milliseconds, in a thread: at most two frames a second, and none that nobody wants to see."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._looked = self._drawn = -_LOOKED_S
        self._picture: tuple[int, bytes] | None = None

    def look(self) -> tuple[int, bytes] | None:
        """The frame's number and its picture as JPEG; None until the next one is answered."""
        now = self._loop.time()
        if now - self._looked > _LOOKED_S:
            self._picture = None  # nobody looked for a while: what is there is old
        self._looked = now
        return self._picture

    async def show(self, images: Sequence[bytes | RawImage], result: FrameResult) -> None:
        """A frame was answered; its last image is the one to see."""
        now = self._loop.time()
        if now - self._looked > _LOOKED_S or now - self._drawn < _APART_S:
            return
        self._drawn = now
        self._picture = result.number, await asyncio.to_thread(draw, images[-1], result, self._config)


def draw(image: bytes | RawImage, result: FrameResult, config: ServerConfig) -> bytes:
    """A small JPEG of an answered frame, its answer below the picture. Raises BadImage."""
    assert result.answer is not None
    (whole,) = decode_images((image,), config)
    picture = ImageOps.contain(whole, (_WIDTH, _HEIGHT))
    _draw_boxes(picture, result.answer.boxes, picture.width / whole.width)
    drawn = Image.new("RGB", (_WIDTH, _HEIGHT + _BAR))
    drawn.paste(picture, ((_WIDTH - picture.width) // 2, (_HEIGHT - picture.height) // 2))
    text = f"{result.answer.label}  {result.answer.confidence:.0%}  {result.latency_s * 1e3:.0f} ms"
    ImageDraw.Draw(drawn).text(
        (_WIDTH / 2, _HEIGHT + _BAR / 2), text, fill="white", font=ImageFont.load_default(26), anchor="mm"
    )
    stream = io.BytesIO()
    drawn.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def _draw_boxes(picture: Image.Image, boxes: Sequence[FoundBox], scale: float) -> None:
    """Those of the last image."""
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    last = max((box.image for box in boxes), default=0)
    for box in boxes:
        if box.image == last:
            edges = [edge * scale for edge in (box.left, box.top, box.right, box.bottom)]
            pen.rectangle(edges, outline=_COLOUR, width=2)
            pen.text((edges[0] + 3, max(0, edges[1] - 17)), f"{box.label} {box.score:.0%}", fill=_COLOUR, font=font)
