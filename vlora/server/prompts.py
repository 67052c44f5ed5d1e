"""Prompts as clients send them: their forms and limits, an adapter's own question, and their encoding in threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from vlora.config import ServerConfig
from vlora.engine.host_resources import default_threads
from vlora.errors import BadRequest, TooLarge, VLoraError, listed
from vlora.models.vision.images import Clip
from vlora.server.active_requests import RequestClock
from vlora.server.detokenizer import MAX_STOP_CHARS, MAX_STOP_STRINGS
from vlora.server.images import EncodedVideo, ImageSources, RawImage, check_number, decode_images
from vlora.types import SamplingParams
from vlora.types.domain import Way
from vlora.types.video import Video, VideoFile

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor, ProcessedImages

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_THREADS = 4  # that prepare requests; the cores belong to the engine
_MAX_WITH_VIDEOS = 4  # requests that hold fetched videos or their frames in memory
# A prompt of this size is ready in under 0.5 ms; a round trip to a thread takes as long on a busy core.
_SHORT_CHARS = 1000
_SHORT_TURNS = 4

Messages = Sequence[Mapping[str, Any]]
"""A conversation for a chat template; content entries are {"type": "image"}, {"type": "video"} or
{"type": "text", "text": ...}."""


class PlainText(NamedTuple):
    """A raw text prompt: no chat template, no images. special: whether tokens such as <bos> are added."""

    text: str
    special: bool = True


class PromptTokens(NamedTuple):
    """A prompt as token ids of the model's tokenizer."""

    token_ids: tuple[int, ...]


class Conversation(NamedTuple):
    """Messages for a chat template. tools: in OpenAI's form, for a template that takes them (`takes_tools`).
    begins_answer: whether the assistant's turn begins after the messages."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    begins_answer: bool = True


Prompt = PlainText | PromptTokens | Conversation
Asked = str | Messages | Prompt
"""A question (images and videos are placed before it), a conversation, or a raw prompt."""

Image = bytes | RawImage | str
"""An encoded image, raw pixels, or the URL of an encoded one."""

Visual = Image | Video[Image] | EncodedVideo
"""An image of a prompt, a video of such images, or a video from which the server takes frames."""


def as_prompt(asked: Asked, visuals: Sequence[object] = ()) -> Prompt:
    """A question as a user's turn, with its images and videos before the text."""
    if isinstance(asked, PlainText | PromptTokens | Conversation):
        return asked
    if isinstance(asked, str):
        content = [{"type": "video" if isinstance(one, Video | VideoFile) else "image"} for one in visuals]
        content += [{"type": "text", "text": asked}] if asked.strip() else []
        asked = [{"role": "user", "content": content}]
    return Conversation(asked)


def check_text(prompt: Prompt, sampling: SamplingParams, config: ServerConfig) -> None:
    """Check the prompt's text and the stop strings.

    Raises:
        BadRequest: A text has an unpaired surrogate, or there are too many or too long stop strings.
        TooLarge: The prompt has more characters than the server accepts.
    """
    texts = [*_texts(prompt)]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"prompt contains an unpaired surrogate at index {error.start} (text begins with {text[:20]!r})",
                field="prompt",
            ) from error
    length = sum(len(text) for text in texts)
    if length > config.max_prompt_chars:
        raise TooLarge(
            f"the prompt has {length} characters; this server takes at most {config.max_prompt_chars}", field="prompt"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop has {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop")
    longest = max(map(len, sampling.stop), default=0)
    if longest > MAX_STOP_CHARS:
        raise BadRequest(f"a stop string has {longest} characters; at most {MAX_STOP_CHARS} are allowed", field="stop")


def is_empty(prompt: Prompt) -> bool:
    """Whether the prompt has no content. A plain text of blanks counts as content."""
    if not isinstance(prompt, Conversation):
        return not prompt[0]
    return not any(text.strip() for text in _texts(prompt))


def has_question(prompt: Prompt) -> bool:
    """Whether the prompt contains a question. Tools and a system message are not a question."""
    if isinstance(prompt, Conversation):
        prompt = Conversation([message for message in prompt.messages if message["role"] != "system"])
    return not is_empty(prompt)


def with_question(prompt: Prompt, question: str) -> Prompt:
    """A prompt of images only, completed with an adapter's question."""
    if not isinstance(prompt, Conversation):
        return prompt
    *before, last = prompt.messages
    content = [] if isinstance(last["content"], str) else list(last["content"])
    return prompt._replace(messages=[*before, {**last, "content": [*content, {"type": "text", "text": question}]}])


def with_pictures(prompt: Prompt, visuals: Sequence[object]) -> Prompt:
    """A prompt with pictures in the place of each video, as many as it has frames: for models that take no videos."""
    if not isinstance(prompt, Conversation):
        return prompt
    videos = (one for one in visuals if isinstance(one, Video))

    def shown(part: Mapping[str, str]) -> list[Mapping[str, str]]:
        return [{"type": "image"} for _ in next(videos).frames] if part["type"] == "video" else [part]

    in_parts = (message["content"] for message in prompt.messages)
    contents = [each if isinstance(each, str) else [*itertools.chain(*map(shown, each))] for each in in_parts]
    turns = zip(prompt.messages, contents, strict=True)
    return prompt._replace(messages=[{**message, "content": content} for message, content in turns])


def text_of_question(prompt: Prompt) -> str | None:
    """The text of a prompt that is a single question, possibly empty; None for other prompts."""
    if not isinstance(prompt, Conversation) or prompt.tools or [each["role"] for each in prompt.messages] != ["user"]:
        return None
    return " ".join(_texts(prompt))


def missing_question(adapter: str | None, questions: Collection[str]) -> BadRequest:
    """The error for images without text."""
    if adapter is None:
        why = "the base model has no default question"
    elif not questions:
        why = f"adapter {adapter!r} has no default question"
    else:
        why = f"adapter {adapter!r} has several questions: {listed(sorted(questions))}"
    return BadRequest(f"the prompt has images but no text, and {why}; send a question with the images", field="prompt")


def is_short(prompt: Prompt) -> bool:
    """Whether the hand-over to a thread costs more than tokenizing on the event loop (prompts without images)."""
    if isinstance(prompt, Conversation) and (prompt.tools or len(prompt.messages) > _SHORT_TURNS):
        return False
    return sum(map(len, _texts(prompt))) <= _SHORT_CHARS


def _texts(prompt: Prompt) -> Iterator[str]:
    if isinstance(prompt, PlainText):
        yield prompt.text
    if not isinstance(prompt, Conversation):
        return
    for message in prompt.messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")
    yield from map(json.dumps, prompt.tools)


def _images_of(visuals: Sequence[Visual]) -> list[Image]:
    """Images, and those of videos that are decoded, in order."""
    listed = ((one.frames if isinstance(one, Video) else (one,)) for one in visuals if not isinstance(one, VideoFile))
    return [*itertools.chain(*listed)]


Processed = tuple[Sequence[Visual], "ProcessedImages"]
"""Images and videos, encoded videos as their frames; and all of them processed."""


class SharedImages:
    """Images of one or several requests, which are decoded and processed once: when the first request needs them."""

    def __init__(self, images: Sequence[Visual]) -> None:
        self.images = images
        self._lock = asyncio.Lock()
        self._outcome: Processed | VLoraError | None = None

    def __len__(self) -> int:
        return len(self.images)

    async def processed(self, process: Callable[[Sequence[Visual]], Awaitable[Processed]]) -> Processed:
        """What the first call of `process` that ends returns. Raises its VLoraError, each time."""
        async with self._lock:  # if the request that processes them is cancelled, the next one does
            if self._outcome is None:
                try:
                    self._outcome = await process(self.images)
                except VLoraError as error:
                    self._outcome = error
        if isinstance(self._outcome, VLoraError):
            raise self._outcome
        return self._outcome


Images = Sequence[Visual] | SharedImages


def visuals_of(images: Images) -> Sequence[Visual]:
    return images.images if isinstance(images, SharedImages) else images


class Level(NamedTuple):
    """A request's service level and its token's name, as in `Request`."""

    max_latency_s: float | None = None
    max_ttft_s: float | None = None
    priority: int = 0
    tenant: str | None = None

    @classmethod
    def of(cls, call: Any, tenant: str | None) -> Level:
        """Of a call over RPyC, or of a body over HTTP."""
        return cls(call.max_latency_s, getattr(call, "max_ttft_s", None), call.priority, tenant)


NO_LEVEL = Level()


class TextRequest(NamedTuple):
    """A prompt with images that words answer, or the head of a domain.

    Attributes:
        images: Encoded bytes or URLs, and videos of such frames, in order.
        adapter: The name of an adapter or a domain, or a composition of them (`vlora.types.composition`).
        num_choices: Answers to generate; each counts as an active request.
        whole: The caller needs only the Answer.
        answer: Whether a head or words answer; None: the domain's better way (`vlora.server.domains`).
    """

    prompt: Asked
    images: Images = ()
    adapter: str | None = None
    sampling: SamplingParams = SamplingParams()
    level: Level = NO_LEVEL
    num_choices: int = 1
    whole: bool = False
    answer: Way | None = None


class PromptEncoder:
    """One per front end, used from its event loop."""

    def __init__(self, processor: InputProcessor, config: ServerConfig) -> None:
        self._processor = processor
        self._config = config
        self._sources = ImageSources(config)
        self._with_videos = asyncio.Semaphore(_MAX_WITH_VIDEOS)
        num_threads = min(_MAX_THREADS, default_threads())
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vlora-prepare")

    async def encode(self, asked: Asked, images: Images, clock: RequestClock) -> EncodedPrompt:
        """Encode a prompt with its images and videos, which are processed in a thread.

        The frames of videos count as images.

        Raises:
            BadRequest: The prompt or a video cannot be encoded, or an image's source is not allowed.
            BadImage, TooLarge: An image is invalid, or over a limit of the server.
            DeadlineMissed: The request's deadline passed meanwhile.
        """
        prompt = as_prompt(asked, visuals_of(images))
        with contextlib.nullcontext() if clock.trace is None else clock.trace.part("process input"):
            if not images and is_short(prompt):
                return self._encode(prompt, self._processor.process_images(()))
            shared = images if isinstance(images, SharedImages) else SharedImages(images)
            with clock.bound():
                async with asyncio.timeout_at(clock.deadline):
                    visuals, processed = await shared.processed(self._read_and_process)
                    if not self._processor.takes_videos:
                        prompt = with_pictures(prompt, visuals)
                    if is_short(prompt) and sum(map(len, processed.placeholders)) <= _SHORT_CHARS:
                        return self._encode(prompt, processed)
                    return await self._in_thread(self._encode, prompt, processed)

    async def read(self, images: Sequence[Image], clock: RequestClock) -> list[bytes | RawImage]:
        """The images' bytes or raw pixels from their sources. Raises as `encode`."""
        with clock.bound():
            async with asyncio.timeout_at(clock.deadline):
                return await self._sources.read(images)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._sources.close()

    async def _read(self, visuals: Sequence[Visual]) -> tuple[list[Visual], list[bytes | RawImage]]:
        """The visuals, encoded videos as their frames; and all images, those of videos included, from their sources."""
        found = list(visuals)
        check_number(_images_of(found), self._config)
        for place, visual in enumerate(visuals):
            if isinstance(visual, VideoFile):
                number = sum(isinstance(one, Video | VideoFile) for one in visuals[: place + 1])
                found[place] = await self._sources.frames(visual, number, _images_of(found))
        for one in found:
            if isinstance(one, Video):
                one.check()
        return found, await self._sources.read(_images_of(found))

    async def _read_and_process(self, visuals: Sequence[Visual]) -> Processed:
        has_video = any(isinstance(one, VideoFile) for one in visuals)
        async with self._with_videos if has_video else contextlib.nullcontext():
            found, read = await self._read(visuals)
            shown: Sequence[Visual] = found if self._processor.takes_videos else read
            return found, await self._in_thread(self._process, shown, read)

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

    def _encode(self, prompt: Prompt, images: ProcessedImages) -> EncodedPrompt:
        match prompt:
            case PromptTokens():
                return self._processor.as_given(prompt.token_ids)
            case PlainText():
                return self._processor.encode_processed(self._processor.as_text(prompt.text), images, prompt.special)
            case Conversation():
                return self._processor.encode_processed(self._processor.template(*prompt), images)


# Files beside an adapter that change the prompts it was trained with: chat template, tokens, processing of images.
#
# Prompts are those of the base model for all adapters. Trainers copy its files beside each adapter; only a difference
# of content is reported.


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _Tokenizer(msgspec.Struct):
    """The parts of `tokenizer.json` and `tokenizer_config.json`; the vocabulary is left out, which takes long."""

    added_tokens: list[_Token] = []
    added_tokens_decoder: dict[int, _Token] = {}
    chat_template: str | list[dict[str, str]] | None = None


def prompt_warnings(name: str, folder: Path, processor: InputProcessor) -> tuple[str, ...]:
    """How the prompts of an adapter's training differ from those that it is served with. They are logged, too."""
    try:
        found = tuple(_differences(folder, processor))
    except Exception as error:  # files may have any content
        found = (f"its files beside the weights cannot be compared with the base model's: {error}",)
    for warning in found:
        log.warning("adapter %r: %s", name, warning)
    return found


def _differences(folder: Path, processor: InputProcessor) -> Iterator[str]:
    read = {name: _read(folder / name, _Tokenizer) for name in ("tokenizer.json", "tokenizer_config.json")}
    config = read["tokenizer_config.json"]
    template = config.chat_template
    for name in ("chat_template.json", "processor_config.json"):
        template = _read(folder / name, _Tokenizer).chat_template or template
    if (own := folder / "chat_template.jinja").is_file():
        template = own.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if template is not None and _same_lines(template) not in _templates(processor):
        yield (
            "its folder has another chat template than the base model, whose template is used; an adapter that was "
            "trained with its own answers worse: train it with the base model's, or put its own into the model's folder"
        )
    tokens = {each.content: each.id for each in read["tokenizer.json"].added_tokens}
    tokens |= {each.content: number for number, each in config.added_tokens_decoder.items()}
    tokens |= _read(folder / "added_tokens.json", dict[str, int])
    changed = [token for token, number in tokens.items() if processor.tokenizer.convert_tokens_to_ids(token) != number]
    if changed:
        yield (
            f"its tokenizer has other tokens than the base model's: {listed(sorted(map(repr, changed)))}; prompts are "
            "tokenized as the base model's, so an adapter trained with them does not get them"
        )
    fields = _read(folder / "processor_config.json", dict[str, Any]).get("image_processor") or {}
    if fields := _read(folder / "preprocessor_config.json", dict[str, Any]) or fields:
        ours = processor.image_processor
        made, used = type(ours).from_dict(fields).to_dict(), ours.to_dict()
        if differing := [key for key in used if not key.endswith(("_type", "_class")) and made.get(key) != used[key]]:
            yield f"its image processor has another {listed(differing)} than the base model's, which is used"


def _templates(processor: InputProcessor) -> Iterator[str]:
    """The template that is used, then the tokenizer's own: trainers that save the tokenizer alone write that one."""
    yield _same_lines(processor.tokenizer.chat_template)
    if place := processor.tokenizer.name_or_path:
        kind: Any = type(processor.tokenizer)
        yield _same_lines(_template_of(kind, place))


@functools.cache
def _template_of(tokenizer: Any, place: str) -> Any:
    from vlora.models.pretrained import from_pretrained  # imports transformers, as the processor does

    return from_pretrained(tokenizer, place).chat_template


def _same_lines(template: Any) -> str:
    """A template without a line end at its end, which has no effect. Of several templates, that of ordinary chats."""
    return str(template.get("default") if isinstance(template, dict) else template).removesuffix("\n")


def _read(file: Path, kind: Any) -> Any:
    """A JSON file's content; an empty one if there is no file."""
    if not file.is_file():
        return kind() if isinstance(kind, type) else {}
    return msgspec.json.decode(file.read_bytes(), type=kind)
