"""Preparation of requests: reads, decodes, templates, tokenizes and processes prompts and images in threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vlora.config import ServerConfig
from vlora.engine.host_resources import default_threads
from vlora.errors import VLoraError
from vlora.models.vision.images import Clip
from vlora.server.active_requests import RequestClock
from vlora.server.media.image_decoding import RawImage, check_number, decode_images
from vlora.server.media.image_sources import ImageSources
from vlora.server.prompts import Conversation, Image, PlainText, Prompt, PromptTokens, Visual, is_short
from vlora.types.video import Video

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor, ProcessedImages

T = TypeVar("T")

_MAX_THREADS = 4  # that prepare requests; the cores belong to the engine


class SharedImages:
    """The images of several requests, which are decoded and processed once: when the first request needs them."""

    def __init__(self, images: Sequence[Visual]) -> None:
        self._images = images
        self._lock = asyncio.Lock()
        self._outcome: ProcessedImages | VLoraError | None = None

    def __len__(self) -> int:
        return len(self._images)

    @property
    def images(self) -> Sequence[Visual]:
        """As given."""
        return self._images

    async def processed(self, process: Callable[[Sequence[Visual]], Awaitable[ProcessedImages]]) -> ProcessedImages:
        """The processed images, by the first call of `process` that ends. Raises its VLoraError, each time."""
        async with self._lock:  # if the request that processes them is cancelled, the next one does
            if self._outcome is None:
                try:
                    self._outcome = await process(self._images)
                except VLoraError as error:
                    self._outcome = error
        if isinstance(self._outcome, VLoraError):
            raise self._outcome
        return self._outcome


Images = Sequence[Visual] | SharedImages


class PromptEncoder:
    """One per front end, used from its event loop."""

    def __init__(self, processor: InputProcessor, config: ServerConfig) -> None:
        self._processor = processor
        self._config = config
        self._sources = ImageSources(config)
        num_threads = min(_MAX_THREADS, default_threads())
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vlora-prepare")

    async def encode(self, prompt: Prompt, images: Images, clock: RequestClock) -> EncodedPrompt:
        """Encode a prompt with its images and videos in a thread; short prompts without any on the event loop.

        The frames of videos count as images.

        Raises:
            BadRequest: The prompt or a video cannot be encoded, or an image's source is not allowed.
            BadImage, TooLarge: An image is invalid, or over a limit of the server.
            DeadlineMissed: The request's deadline passed meanwhile.
        """
        if not images and is_short(prompt):
            return self._encode(prompt, self._processor.process_images(()))
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                if isinstance(images, SharedImages):
                    processed = await images.processed(self._read_and_process)
                    return await self._in_thread(self._encode, prompt, processed)
                encoded = await self._read(images)
                return await self._in_thread(self._process_and_encode, prompt, images, encoded)

    async def read(self, images: Sequence[Image], clock: RequestClock) -> list[bytes | RawImage]:
        """The images' bytes or raw pixels from their sources. Raises as `encode`."""
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                return await self._sources.read(images)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._sources.close()

    async def _read(self, visuals: Sequence[Visual]) -> list[bytes | RawImage]:
        """All images, those of videos included."""
        images: list[Image] = []
        for visual in visuals:
            images += visual.frames if isinstance(visual, Video) else (visual,)
        check_number(images, self._config)
        for visual in visuals:
            if isinstance(visual, Video):
                visual.check()
        return await self._sources.read(images)

    async def _read_and_process(self, visuals: Sequence[Visual]) -> ProcessedImages:
        return await self._in_thread(self._process, visuals, await self._read(visuals))

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _process(self, visuals: Sequence[Visual], images: Sequence[bytes | RawImage]) -> ProcessedImages:
        """images: as `_read` returns them."""
        decoded = iter(decode_images(images, self._config))
        pixels = [
            Clip(tuple(itertools.islice(decoded, len(one.frames))), one.times)
            if isinstance(one, Video)
            else next(decoded)
            for one in visuals
        ]
        return self._processor.process_images(pixels)

    def _process_and_encode(
        self, prompt: Prompt, visuals: Sequence[Visual], images: Sequence[bytes | RawImage]
    ) -> EncodedPrompt:
        return self._encode(prompt, self._process(visuals, images))

    def _encode(self, prompt: Prompt, images: ProcessedImages) -> EncodedPrompt:
        match prompt:
            case PromptTokens():
                return self._processor.as_given(prompt.token_ids)
            case PlainText():
                return self._processor.encode_processed(self._processor.as_text(prompt.text), images)
            case str():
                text = self._processor.ask(prompt, [item.kind for item in images.vision])
            case Conversation():
                text = self._processor.template(prompt.messages, prompt.tools)
            case _:
                text = self._processor.template(prompt)
        return self._processor.encode_processed(text, images)
