"""One frame stream: waiting frames, running frames, unacknowledged results, and a preview while it is viewed.

The sender numbers frames from 0. After a broken connection it may send a frame or request results again: a known number
has no effect, and results stay until they are acknowledged. A resumed stream needs nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlora.client.values import FrameAnswer, FrameResult, FrameResults, StreamOptions
from vlora.config import ServerConfig
from vlora.errors import BadRequest, DeadlineMissed, UnknownStream, VLoraError
from vlora.server.images import RawImage, decode_images
from vlora.server.metrics import Metrics
from vlora.server.security.limits import ByteCharge
from vlora.server.streams.frame_questions import FrameExecutor, FrameQuestions
from vlora.types import ErrorValue, FoundBox

log = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 256  # accepted frames of a stream with an unacknowledged result

_MAX_WAITING = 4
_MAX_RUNNING = 4  # enough for batching, few enough for low latency
_MAX_RESULTS_PER_PULL = 64


class _Frame(NamedTuple):
    number: int
    images: tuple[bytes | RawImage, ...]
    arrived: float
    charge: ByteCharge


class StreamSession:
    """Used from one event loop. At most one send and one pull wait at a time; a later call replaces the waiting one."""

    def __init__(
        self,
        executor: FrameExecutor,
        options: StreamOptions,
        num_images: int | None,
        metrics: Metrics,
        preview: Preview | None = None,
        tenant: str | None = None,
    ) -> None:
        """num_images: per frame; None for one or more. preview: receives every answered frame."""
        self._executor = executor
        self._metrics = metrics
        self.options = options
        self._preview = preview
        self._questions = FrameQuestions(executor, options, tenant)
        self.num_answered = self.num_dropped = self.num_failed = 0
        self.last_result: FrameResult | None = None
        self._num_images = num_images
        self._loop = asyncio.get_running_loop()
        self._interval_s = 0.0 if options.fps is None else 1 / options.fps
        self._due = self._loop.time()  # when the next frame may start
        self._timer: asyncio.TimerHandle | None = None  # of the next start or the end of a waiting frame
        self._num_taken = 0
        self._waiting: deque[_Frame] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._results: dict[int, FrameResult] = {}
        self._acknowledged = -1
        self._ended = False
        self._cancelled = False
        self._sends = 0
        self._pulls = 0
        self._changed = asyncio.Event()
        self._next: asyncio.Future[bytes | RawImage | None] | None = None

    async def next_image(self) -> bytes | RawImage | None:
        """The last image of the next accepted frame; None if the stream is cancelled before."""
        self._next = self._next or self._loop.create_future()
        return await asyncio.shield(self._next)

    async def send(self, number: int, images: tuple[bytes | RawImage, ...], wait_s: float, charge: ByteCharge) -> bool:
        """Accept a frame, waiting up to `wait_s` for room. Returns False when there is none.

        charge: released when the images are no longer needed: immediately when the frame is not accepted.

        Raises:
            BadRequest: The number is out of sequence, the number of images is wrong, or the stream has ended.
            UnknownStream: The stream was cancelled meanwhile.
        """
        taken = False
        try:
            taken = await self._take(number, images, wait_s, charge)
        finally:
            if not taken:
                charge.release()
        return taken or 0 <= number < self._num_taken

    async def pull(self, acknowledged: int, wait_s: float) -> FrameResults:
        """The results after frame `acknowledged`, in frame order; waits up to `wait_s` for the first.

        acknowledged: number of the last frame with a received result, -1 for none. Results up to it are deleted.

        Raises:
            BadRequest: `acknowledged` is out of range.
            UnknownStream: The stream was cancelled meanwhile.
        """
        self._pulls += 1
        turn = self._pulls
        self._acknowledge(acknowledged)
        wanted = acknowledged + 1
        await self._until(
            lambda: wanted in self._results or self._pulls != turn or (self._ended and wanted == self._num_taken),
            wait_s,
        )
        results: list[FrameResult] = []
        while self._pulls == turn and wanted in self._results and len(results) < _MAX_RESULTS_PER_PULL:
            results.append(self._results[wanted])
            wanted += 1
        return FrameResults(results=tuple(results), finished=self._ended and wanted == self._num_taken)

    def end(self) -> None:
        """Accept no more frames; accepted frames are still answered."""
        self._ended = True
        self._notify()

    def cancel(self) -> None:
        """Cancel all frames and release their memory."""
        self._ended = self._cancelled = True
        for task in self._running:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for frame in self._waiting:
            frame.charge.release()
        for _ in range(self._num_taken - self.num_answered - self.num_dropped - self.num_failed):
            self._metrics.frame_ended("closed")
        self._waiting.clear()
        self._results.clear()
        self._show(None)
        self._notify()

    def resume(self) -> None:
        """Start the waiting frames: an engine is ready, or none will start."""
        self._start_due()

    @property
    def num_waiting(self) -> int:
        """Accepted frames that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        unacknowledged = self._num_taken - 1 - self._acknowledged
        return unacknowledged < MAX_UNACKNOWLEDGED and (
            self.options.drop == "newest" or len(self._waiting) < _MAX_WAITING
        )

    async def _take(self, number: int, images: tuple[bytes | RawImage, ...], wait_s: float, charge: ByteCharge) -> bool:
        """Whether the frame was new and there was room."""
        self._sends += 1
        turn = self._sends
        self._notify()
        if 0 <= number < self._num_taken:
            return False
        if number != self._num_taken:
            raise BadRequest(f"got frame {number}; expected frame {self._num_taken}")
        if self._num_images is not None and len(images) != self._num_images:
            adapter, head = self.options.heads[0]
            raise BadRequest(
                f"head {head!r} of adapter {adapter!r} reads {self._num_images} "
                f"image{'s' * (self._num_images != 1)} per frame; got {len(images)}"
            )
        if not images:
            raise BadRequest("the frame has no image; send at least one")
        await self._until(lambda: self._ended or self._sends != turn or self._has_room, wait_s)
        if self._ended:
            raise BadRequest("the stream has ended and accepts no more frames")
        if self._sends != turn or not self._has_room:
            return False
        if self.options.drop == "newest" and self._waiting:
            old = self._waiting.popleft()
            self._finish(old, dropped=f"frame {number} arrived before this one was started")
            old.charge.release()
        self._waiting.append(_Frame(number, images, self._loop.time(), charge))
        self._num_taken += 1
        self._show(images[-1])
        self._metrics.frames_taken.inc()
        self._start_due()
        return True

    def _show(self, image: bytes | RawImage | None) -> None:
        if self._next is not None:
            self._next.set_result(image)
            self._next = None

    def _acknowledge(self, number: int) -> None:
        if number < self._acknowledged:
            raise BadRequest(f"results up to frame {self._acknowledged} were acknowledged and are no longer available")
        between = range(self._acknowledged + 1, min(number, self._num_taken) + 1)
        if number >= self._num_taken or not all(each in self._results for each in between):
            raise BadRequest(f"frame {number} cannot be acknowledged: it has no result yet")
        for each in between:
            del self._results[each]
        self._acknowledged = number
        self._notify()

    def _start_due(self) -> None:
        """Start waiting frames, within the limit of running frames and at the stream's frame rate."""
        if self._executor.engine_starting:
            self._expire_waiting()
        while self._waiting and len(self._running) < _MAX_RUNNING and not self._executor.engine_starting:
            now = self._loop.time()
            if now < self._due:
                self._wake_at(self._due)
                break
            # A late frame does not delay the following frames.
            self._due = max(self._due, now - self._interval_s) + self._interval_s
            frame = self._waiting.popleft()
            task = asyncio.create_task(self._answer(frame))
            self._running.add(task)
            task.add_done_callback(functools.partial(self._on_answered, frame))
        self._notify()

    def _wake_at(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time_s, self._start_due)

    def _expire_waiting(self) -> None:
        """Fail waiting frames at their bound, not at the time of their start."""
        bound, now = self.options.max_latency_s, self._loop.time()
        if bound is None:
            return
        while self._waiting and now >= self._waiting[0].arrived + bound:
            frame = self._waiting.popleft()
            why = f"the frame was not answered within the stream's {bound:g} s: the engine is restarting"
            self._finish(frame, error=DeadlineMissed(why))
            frame.charge.release()
        if self._waiting:
            self._wake_at(self._waiting[0].arrived + bound)

    def _on_answered(self, frame: _Frame, task: asyncio.Task[None]) -> None:
        frame.charge.release()
        self._running.discard(task)
        if not task.cancelled():  # otherwise the stream or the loop is closing
            self._start_due()

    async def _answer(self, frame: _Frame) -> None:
        bound = self.options.max_latency_s
        left = None if bound is None else bound - (self._loop.time() - frame.arrived)
        if left is not None and left <= 0:
            self._finish(frame, error=DeadlineMissed(f"the frame was not answered within the stream's {bound:g} s"))
            return
        answers = await self._questions.answers(frame.images, left)
        errors = [answer.error for answer in answers if answer.error is not None]
        if len(errors) == len(answers):
            self._finish(frame, answers=answers, error=errors[0].to_exception())
            return
        result = self._finish(frame, answers=answers)
        if self._preview is not None:
            try:
                await self._preview.update(frame.images, result)
            except Exception:  # the frame is answered
                log.exception("frame %d of a stream cannot be drawn for the console", frame.number)

    def _finish(
        self,
        frame: _Frame,
        *,
        answers: tuple[FrameAnswer, ...] = (),
        dropped: str | None = None,
        error: VLoraError | None = None,
    ) -> FrameResult:
        latency_s = self._loop.time() - frame.arrived
        if error is not None:
            self._metrics.frame_ended(error.code)
        elif dropped is not None:
            self._metrics.frame_ended("dropped")
        else:
            self._metrics.frame_ended("answered", latency_s)
        result = FrameResult(
            number=frame.number,
            latency_s=latency_s,
            answers=answers,
            dropped=dropped,
            error=None if error is None else ErrorValue.of(error),
        )
        self._results[frame.number] = self.last_result = result
        self.num_answered += dropped is None and error is None
        self.num_dropped += dropped is not None
        self.num_failed += error is not None
        self._notify()
        return result

    async def _until(self, ready: Callable[[], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not ready() and not self._cancelled:
                    await self._changed.wait()
        if self._cancelled:
            raise UnknownStream("the stream was closed")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


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
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    last = max((box.image for box in boxes), default=0)
    for box in boxes:
        if box.image == last:
            edges = [edge * scale for edge in (box.left, box.top, box.right, box.bottom)]
            pen.rectangle(edges, outline=_COLOUR, width=2)
            pen.text((edges[0] + 3, max(0, edges[1] - 17)), f"{box.label} {box.score:.0%}", fill=_COLOUR, font=font)
