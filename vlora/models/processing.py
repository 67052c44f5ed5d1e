"""Converts user input (a question, images) to engine input (token ids, processed tensors).

Only the tokenizer and the image processor are used. The families' combined processors require torchvision for videos,
which a CPU machine may not have, and hide the number of placeholder tokens of an image.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlora.errors import BadConfig, BadImage, BadRequest, VLoraError
from vlora.models.families import family_of, placeholder_count
from vlora.models.processor_files import TEMPLATE_FILES, read_parts
from vlora.models.qwen_vl.tokenizer import byte_letters
from vlora.models.vision.images import Clip, Region, upright_rgb
from vlora.models.vision.videos import VIDEO_FAMILIES, VideoProcessor
from vlora.types import TensorValue, VisionInput

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedTokenizerBase

Array = np.ndarray[Any, Any]

_IMAGE_FIELDS = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")

# Also of vocabularies that are shared with models of videos.
_MARKERS = ("<image>", "<video>", "<|image_pad|>", "<|video_pad|>")
# Private-use characters around a marker that a user typed, from the template to the tokenizer.
_TYPED, _TYPED_END = "\U000f0000", "\U000f0001"
_PROBE = "cobalt0417"  # in no template
_PROBE_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}


class EncodedPrompt(NamedTuple):
    """A prompt in the form of a Request: placeholders expanded, and one VisionInput per image or video, in order.

    shown: the part of each image that its tokens represent.
    """

    prompt_ids: tuple[int, ...]
    vision: tuple[VisionInput, ...]
    shown: tuple[Region, ...] = ()


class ProcessedImages(NamedTuple):
    """Images and videos after their processors, in order.

    placeholders: the text of the tokens of each. shown: as in an EncodedPrompt.
    """

    vision: tuple[VisionInput, ...] = ()
    placeholders: tuple[str, ...] = ()
    shown: tuple[Region, ...] = ()


class InputProcessor:
    """Chat template, tokenizer and image processor of one model."""

    def __init__(
        self,
        config: Any,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        video_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """video_settings: of the checkpoint's video processor; None for transformers' defaults."""
        self.config = config
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.family = family_of(config)
        self.image_token_id: int = config.image_token_id
        self.image_token: str = tokenizer.convert_ids_to_tokens([self.image_token_id])[0]
        ids = [self.image_token_id, getattr(config, "video_token_id", None)]
        own = (tokenizer.convert_ids_to_tokens([one])[0] for one in ids if one is not None)
        shared = (name for name in _MARKERS if name in tokenizer.added_tokens_encoder)
        markers = [marker for marker in dict.fromkeys((*own, *shared)) if marker is not None]
        self._markers = re.compile("|".join(map(re.escape, markers)))
        self._typed_markers = re.compile(f"{_TYPED}({self._markers.pattern}){_TYPED_END}|[{_TYPED}{_TYPED_END}]")
        self._as_text = {marker: _ids_as_text(tokenizer, marker) for marker in markers}
        self._tokenize = _short_way(tokenizer)
        self._video_settings = video_settings or {}

    @classmethod
    def from_pretrained(cls, path: str) -> InputProcessor:
        """Load from a folder or hub name.

        Raises:
            BadConfig: A part of the model is missing or broken, or belongs to another model.
            UnsupportedModel: The model's family is not supported.
        """
        processor = cls(*read_parts(path))
        processor._check(path)
        return processor

    def chat(self, question: str, num_images: int = 0) -> str:
        """Apply the chat template to one user turn: images first, then the question, then the generation prompt."""
        return self.ask(question, ["image"] * num_images)

    def ask(self, question: str, kinds: Sequence[str]) -> str:
        """As `chat`, for images and videos. kinds: image or video, in order."""
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": question}]
        return self.template([{"role": "user", "content": content}])

    @functools.cached_property
    def _videos(self) -> VideoProcessor:
        """Raises BadRequest if the family takes no videos."""
        return VideoProcessor(self.config, self.tokenizer, self.image_processor, self._video_settings)

    @property
    def takes_videos(self) -> bool:
        """Whether prompts may have videos. Other families take their frames as images."""
        return self.config.model_type in VIDEO_FAMILIES

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that stand for images, ends of turns, and the like."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(sorted({str(one) for one in added if one.special} | {self.image_token}))

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template supports tools, tool calls and their results."""
        turn = {"role": "user", "content": [{"type": "text", "text": "question"}]}
        try:
            return _PROBE in self.template([turn], [_PROBE_TOOL])
        except (BadConfig, BadRequest):
            return False

    def template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), begins_answer: bool = True
    ) -> str:
        """Apply the chat template to a whole conversation. Markers of images and videos in its texts stay text.

        Args:
            messages: Messages with content entries {"type": "image"}, {"type": "video"} or {"type": "text", ...}.
            tools: Tools in the format of OpenAI's API, for a template that `takes_tools`.
            begins_answer: Whether the assistant's turn begins after them.

        Raises:
            BadRequest: The template rejects the messages.
        """
        if self.tokenizer.chat_template is None:
            raise BadConfig("the tokenizer has no chat template; add chat_template.jinja to the model folder")
        try:
            turns: Any = self.as_text(list(messages))
            declared: Any = self.as_text(list(tools)) or None
            asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": begins_answer}
            return str(self.tokenizer.apply_chat_template(turns, declared, **asked))
        except Exception as error:  # jinja raises its own classes, and templates raise through it
            raise BadRequest(f"the model's chat template rejects these messages: {error}") from error

    def as_text(self, value: Any) -> Any:
        """A text, or all texts of a list or mapping, in which typed markers of images and videos are text: they stand
        for no image and become ordinary tokens, as with `sanitize_control_tokens` of transformers."""
        if isinstance(value, str):
            return self._markers.sub(rf"{_TYPED}\g<0>{_TYPED_END}", value)
        if isinstance(value, Mapping):
            return {self.as_text(name): self.as_text(one) for name, one in value.items()}
        return [self.as_text(one) for one in value] if isinstance(value, list | tuple) else value

    def _check(self, path: str) -> None:
        """Check that the parts belong to one model, with a question about a picture.

        Raises:
            BadConfig: They do not; the message names the part.
        """
        from PIL import Image  # an engine without a front end needs no Pillow

        rows = self.config.text_config.vocab_size
        copy_tokenizer = "copy tokenizer.json and tokenizer_config.json of this model"
        if len(self.tokenizer) > rows or self.image_token is None:
            raise BadConfig(
                f"the tokenizer of {path!r} belongs to another model: it has {len(self.tokenizer)} tokens, the model's "
                f"embeddings have {rows} rows, and token {self.image_token_id} stands for images; {copy_tokenizer}"
            )
        text = ""
        try:
            text = self.chat(_PROBE, 1)
        except BadConfig:
            problem = "is missing"
        except BadRequest as error:
            problem = f"takes no pictures ({error})"
        else:
            count = text.count(self.image_token)
            if f"'text': '{_PROBE}'" in text or f'"text": "{_PROBE}"' in text:
                problem = "takes text only: it prints a message's parts as a list"
            elif _PROBE not in text:
                problem = "leaves out the text of a message's parts"
            elif count != 1:
                problem = (
                    f"writes {self.image_token} {count} times for one picture, which is token {self.image_token_id} of "
                    "the tokenizer and the model's token for images; template or tokenizer may be another model's"
                )
            else:
                problem = ""
        if problem:
            raise BadConfig(
                f"the chat template of {path!r} {problem}; copy this model's template for pictures into "
                f"chat_template.jinja (looked for in {TEMPLATE_FILES}, then tokenizer_config.json)"
            )
        try:
            encoded = self.encode(text, [Image.new("RGB", (64, 48))])
            shape = encoded.vision[0].fields["pixel_values"].shape
            problem = "" if self._fits(shape) else f"it makes pixel_values of shape {list(shape)} of a picture"
        except (VLoraError, KeyError, AttributeError, IndexError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise BadConfig(
                f"the image processor of {path!r} ({type(self.image_processor).__name__}) does not fit the vision "
                f"tower of this {self.config.model_type} model: {problem}; copy preprocessor_config.json or "
                "processor_config.json of this model"
            )
        if encoded.prompt_ids.count(self.image_token_id) != encoded.vision[0].num_tokens:
            raise BadConfig(
                f"the tokenizer of {path!r} does not read {self.image_token} as token {self.image_token_id}, which "
                f"stands for images; {copy_tokenizer}"
            )

    def _fits(self, shape: tuple[int, ...]) -> bool:
        vision = self.config.vision_config
        if not self.family.mrope:
            return shape[-2:] == (vision.image_size, vision.image_size) and (len(shape) == 5) == self.family.tiles
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        return shape[1:] == (values,) and bool(self.image_processor.merge_size == vision.spatial_merge_size)

    def encode(self, prompt: str, images: Sequence[Image.Image | Clip] = ()) -> EncodedPrompt:
        """Tokenize a prompt (after the chat template) and process its images and videos.

        Raises:
            BadRequest: The numbers of markers and of images or videos differ, or the family takes no videos.
            BadImage: An image or video cannot be processed.
        """
        return self.encode_processed(prompt, self.process_images(images))

    def process_images(self, images: Sequence[Image.Image | Clip]) -> ProcessedImages:
        """Process the images and videos of one prompt, for any number of prompts about them.

        Raises:
            BadRequest: The family takes no videos.
            BadImage: An image or video cannot be processed.
        """
        stills = [one for one in images if not isinstance(one, Clip)]
        made = {
            "image": map(self._expanded_image, self._process(stills)),
            "video": self._expanded_clips([one for one in images if isinstance(one, Clip)]),
        }
        pairs = [next(made["video" if isinstance(one, Clip) else "image"]) for one in images]
        shown = tuple(shown_region(self.image_processor, image.width, image.height) for image in stills)
        return ProcessedImages(tuple(item for item, _ in pairs), tuple(text for _, text in pairs), shown)

    def encode_processed(self, prompt: str, images: ProcessedImages, special: bool = True) -> EncodedPrompt:
        """As `encode`, for images and videos that are processed already. special: whether to add <bos> and the like."""
        kinds, pieces = self._split(prompt, Counter(item.kind for item in images.vision))
        pairs = list(zip(images.vision, images.placeholders, strict=True))
        following = {kind: iter([pair for pair in pairs if pair[0].kind == kind]) for kind in set(kinds)}
        vision: list[VisionInput] = []
        text = pieces[0]
        for kind, piece in zip(kinds, pieces[1:], strict=True):
            item, placeholders = next(following[kind])
            vision.append(item)
            text += placeholders + piece
        return EncodedPrompt(tuple(self._ids(text, special)), tuple(vision), images.shown)

    def as_given(self, token_ids: Sequence[int]) -> EncodedPrompt:
        """A prompt given as token ids, without images."""
        return EncodedPrompt(tuple(token_ids), ())

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """special: whether the text names special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def token_text(self, token_id: int) -> str:
        """The text of one token. Special tokens are shown by name, partial characters as the replacement character."""
        raw = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        if raw is not None and raw.startswith("\u2581"):  # decoders of this kind strip the first space of a text
            return str(raw.replace("\u2581", " "))
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to an answer; None for a special token, which answers do not contain."""
        if token_id in self._special_ids:
            return None
        text = self.token_text(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        raw: str = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        if re.fullmatch("<0x[0-9A-F]{2}>", raw):
            return bytes([int(raw[3:5], 16)])
        letters = byte_letters()
        return bytes(map(letters.__getitem__, raw)) if letters.keys() >= set(raw) else text.encode()

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, one in self.tokenizer.added_tokens_decoder.items() if one.special)

    def _ids(self, text: str, special: bool = True) -> Sequence[int]:
        """The token ids of a text whose typed markers are enclosed by `as_text`."""
        # Templates include the beginning-of-text token; the tokenizer would add a second one.
        bos = self.tokenizer.bos_token
        special = special and not (bos is not None and text.startswith(bos))
        if _TYPED not in text:
            return self._tokenize(text, special)
        first, *rest = self._typed_markers.split(text)
        ids = list(self._tokenize(first, special))
        # After a line end, because some tokenizers add a space to the start of a text.
        line_end = list(self._tokenize("\n", False))
        for marker, piece in zip(rest[::2], rest[1::2], strict=True):
            ids += self._as_text.get(marker, ())
            following = list(self._tokenize(f"\n{piece}", False))
            joined = following[: len(line_end)] != line_end
            ids += self._tokenize(piece, False) if joined else following[len(line_end) :]
        return ids

    def _split(self, prompt: str, counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """The kinds of the markers of images and videos in a prompt, and the texts around them.

        Without videos, their marker is text.

        Raises:
            BadRequest: The numbers of markers differ from those of images and videos.
        """
        kinds = {self.image_token: "image"}
        if counts.get("video"):
            kinds[self._videos.token] = "video"
            prompt = self._videos.bare(prompt)
        parts = re.split(f"(?<!{_TYPED})({'|'.join(map(re.escape, kinds))})", prompt)
        marks, pieces = parts[1::2], parts[::2]
        for mark, kind in kinds.items():
            found, count = marks.count(mark), counts.get(kind, 0)
            if found != count:
                raise BadRequest(f"the prompt has {found} {kind} markers ({mark}) but {count} {kind}s were sent")
        return [kinds[mark] for mark in marks], pieces

    def _expanded_image(self, item: VisionInput) -> tuple[VisionInput, str]:
        return item, self.image_token * item.num_tokens

    def _expanded_clips(self, clips: Sequence[Clip]) -> Iterator[tuple[VisionInput, str]]:
        try:
            processed = [self._videos.process(clip) for clip in clips]
        except (ValueError, TypeError, OSError) as error:
            raise BadImage(f"the image processor rejects the frames of a video: {error}") from error
        for one in processed:
            yield vision_input("video", one.fields, one.num_tokens), self._videos.placeholders(one)

    def _process(self, images: Sequence[Image.Image]) -> tuple[VisionInput, ...]:
        try:
            if self.family.model_type == "llava_onevision" and len(images) > 1:
                # Several images in one prompt are not tiled, so the processor must get them together.
                together = self.image_processor([[upright_rgb(image) for image in images]], return_tensors="np")
                fields = [
                    {
                        "pixel_values": together["pixel_values"][i : i + 1],
                        "image_sizes": together["image_sizes"][i : i + 1],
                        "batch_num_images": np.array([len(images)]),
                    }
                    for i in range(len(images))
                ]
            else:
                fields = [dict(self.image_processor(upright_rgb(image), return_tensors="np")) for image in images]
        except (ValueError, TypeError, OSError) as error:
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
            raise BadImage(f"the image processor rejects the images ({sizes}): {error}") from error
        return tuple(self._vision_input(item) for item in fields)

    def _vision_input(self, fields: Mapping[str, Array]) -> VisionInput:
        fields = {name: fields[name] for name in _IMAGE_FIELDS if name in fields}
        return vision_input("image", fields, placeholder_count(self.config, fields))


def _short_way(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, bool], Sequence[int]]:
    """A function that returns the token ids of a text, with or without special tokens.

    A tokenizer's own call also handles pairs, batches, padding and truncation. For tokenizers of the `tokenizers`
    library that code is bypassed: beside a running engine it is not cached and must be fetched from memory in every
    call (docs/decisions/0003).
    """
    if not tokenizer.is_fast:
        return lambda text, special: tokenizer(text, add_special_tokens=special)["input_ids"]  # type: ignore[no-any-return]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return lambda text, special: backend.encode(text, add_special_tokens=special).ids  # type: ignore[no-any-return]


def _ids_as_text(tokenizer: PreTrainedTokenizerBase, marker: str) -> list[int]:
    """The token ids of a special token's name as ordinary text within a text."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(f"\n{text}", add_special_tokens=False, split_special_tokens=True))

    line_end = ids("")
    for parts in ([marker], list(marker)):  # some added tokens are found in any text
        found = [token for part in parts for token in ids(part)[len(line_end) :]]
        if tokenizer.convert_tokens_to_ids(marker) not in found:
            return found
    return []


def vision_input(kind: str, fields: Mapping[str, npt.ArrayLike], num_tokens: int) -> VisionInput:
    """Pack the processed tensors of one image or video into a value, with the hash that keys its cached embeddings."""
    values = {name: tensor_value(tensor) for name, tensor in sorted(fields.items())}
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        digest.update(f"{kind} {name} {value.dtype} {value.shape}".encode())
        digest.update(value.data)
    return VisionInput(kind=kind, content_hash=digest.hexdigest(), num_tokens=num_tokens, fields=values)  # type: ignore[arg-type]


def tensor_value(tensor: npt.ArrayLike) -> TensorValue:
    array = np.ascontiguousarray(tensor)
    return TensorValue(str(array.dtype), tuple(array.shape), array.tobytes())


def to_tensor(value: TensorValue) -> torch.Tensor:
    """Convert a value to a tensor. Raises BadRequest if its bytes, dtype and shape do not match."""
    import torch  # a front end has none

    try:
        array = np.frombuffer(value.data, dtype=value.dtype).reshape(value.shape)
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"a tensor of dtype {value.dtype} and shape {value.shape} cannot be read from "
            f"{len(value.data)} bytes: {error}"
        ) from error
    return torch.from_numpy(array.copy())


def shown_region(image_processor: Any, width: int, height: int) -> Region:
    """The part of an image that an image processor keeps: the whole image, or its centre crop."""
    if not getattr(image_processor, "do_center_crop", False):
        return Region(0, 0, width, height)
    size, crop = dict(image_processor.size), dict(image_processor.crop_size)
    if "shortest_edge" in size:
        scale = size["shortest_edge"] / min(width, height)
        resized = {"width": width * scale, "height": height * scale}
    else:
        resized = size
    shown = Region(0, 0, width * crop["width"] / resized["width"], height * crop["height"] / resized["height"])
    return shown._replace(left=(width - shown.width) / 2, top=(height - shown.height) / 2)
