"""Preparation of requests: reads, decodes, templates, tokenizes and processes prompts and images in threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vlora.config import ServerConfig
from vlora.engine.host_resources import default_threads
from vlora.models.vision.images import Clip
from vlora.server.active_requests import RequestClock
from vlora.server.media.image_decoding import RawImage, decode_images
from vlora.server.media.image_sources import ImageSources
from vlora.server.prompts import Conversation, Image, PlainText, Prompt, PromptTokens, Visual, is_short
from vlora.types.video import Video

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor

_MAX_THREADS = 4  # that prepare requests; the cores belong to the engine


class PromptEncoder:
    """One per front end, used from its event loop."""

    def __init__(self, processor: InputProcessor, config: ServerConfig) -> None:
        self._processor = processor
        self._config = config
        self._sources = ImageSources(config)
        num_threads = min(_MAX_THREADS, default_threads())
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vlora-prepare")

    async def encode(self, prompt: Prompt, visuals: Sequence[Visual], clock: RequestClock) -> EncodedPrompt:
        """Encode a prompt with its images and videos in a thread; short prompts without any on the event loop.

        The frames of videos count as images.

        Raises:
            BadRequest: The prompt or a video cannot be encoded, or an image's source is not allowed.
            BadImage, TooLarge: An image is invalid, or over a limit of the server.
            DeadlineMissed: The request's deadline passed meanwhile.
        """
        if not visuals and is_short(prompt):
            return self._encode(prompt, (), ())
        images: list[Image] = []
        for visual in visuals:
            if isinstance(visual, Video):
                visual.check()
                images += visual.frames
            else:
                images.append(visual)
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                encoded = await self._sources.read(images)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._encode, prompt, visuals, encoded)

    async def read(self, images: Sequence[Image], clock: RequestClock) -> list[bytes | RawImage]:
        """The images' bytes or raw pixels from their sources. Raises as `encode`."""
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                return await self._sources.read(images)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._sources.close()

    def _encode(self, prompt: Prompt, visuals: Sequence[Visual], images: Sequence[bytes | RawImage]) -> EncodedPrompt:
        """images: all images of the prompt, those of videos included."""
        decoded = iter(decode_images(images, self._config))
        pixels = [
            Clip(tuple(itertools.islice(decoded, len(one.frames))), one.times)
            if isinstance(one, Video)
            else next(decoded)
            for one in visuals
        ]
        match prompt:
            case PromptTokens():
                return self._processor.as_given(prompt.token_ids)
            case PlainText():
                return self._processor.encode(prompt.text)
            case str():
                return self._processor.encode(self._processor.ask(prompt, _kinds(visuals)), pixels)
            case Conversation():
                return self._processor.encode(self._processor.template(prompt.messages, prompt.tools), pixels)
        return self._processor.encode(self._processor.template(prompt), pixels)


def _kinds(visuals: Sequence[Visual]) -> list[str]:
    return ["video" if isinstance(one, Video) else "image" for one in visuals]
