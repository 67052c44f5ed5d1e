"""The files of a checkpoint that turn prompts and pictures into inputs: where each part is found, and whether the parts
belong together.

transformers' own processors need torchvision, so their parts are loaded one by one, from the places where transformers
looks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformers import AutoConfig, AutoTokenizer
from transformers.image_processing_base import ImageProcessingMixin

# Imported from its own module: without torchvision, older versions export a placeholder that raises an error.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.processing_utils import ProcessorMixin

from vlora.errors import BadConfig, BadRequest, VLoraError
from vlora.models.pretrained import from_pretrained
from vlora.models.vision.videos import video_settings

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REASON = 300  # characters of an error of transformers, which may list all model types
_TEMPLATE_FILES = "processor_config.json, chat_template.json, chat_template.jinja"


class ProcessorParts(NamedTuple):
    """video_settings: of the checkpoint's video processor; empty if it has none."""

    config: Any
    tokenizer: Any
    image_processor: Any
    video_settings: dict[str, Any]


def read_parts(path: str) -> ProcessorParts:
    """Read the parts from a folder or hub name. The tokenizer gets the model's chat template: as in transformers the
    processor's if it has one, because the tokenizer's may be for text only.

    Raises:
        BadConfig: A part is missing or cannot be read; the message names its files.
    """
    config = _part(path, "configuration", "config.json", lambda: from_pretrained(AutoConfig, path))
    tokenizer = _part(
        path,
        "tokenizer",
        "tokenizer.json, tokenizer_config.json, or the vocabulary's files",
        lambda: from_pretrained(AutoTokenizer, path),
    )
    # With the config, a processor type that transformers does not know is replaced by the family's.
    image_processor = _part(
        path,
        "image processor",
        "preprocessor_config.json or processor_config.json",
        lambda: from_pretrained(AutoImageProcessor, path, config=config),
    )
    stored = _part(path, "chat template", _TEMPLATE_FILES, lambda: ProcessorMixin.get_processor_dict(path)[0])
    template = stored.get("chat_template")
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        tokenizer.chat_template = template
    videos = _part(
        path, "video processor", "video_preprocessor_config.json or processor_config.json", lambda: video_settings(path)
    )
    _warn_of_another_type(path, image_processor)
    return ProcessorParts(config, tokenizer, image_processor, videos)


def check_parts(processor: InputProcessor, path: str) -> None:
    """Check that the parts belong to one model, with a question about a picture.

    Raises:
        BadConfig: They do not; the message names the part.
    """
    from PIL import Image  # an engine without a front end needs no Pillow

    config, tokenizer = processor.config, processor.tokenizer
    rows = config.text_config.vocab_size
    if len(tokenizer) > rows or processor.image_token is None:
        raise BadConfig(
            f"the tokenizer of {path!r} belongs to another model: it has {len(tokenizer)} tokens, the model's "
            f"embeddings have {rows} rows, and token {processor.image_token_id} stands for images; copy tokenizer.json "
            "and tokenizer_config.json of this model"
        )
    question = "question"
    problem = ""
    if tokenizer.chat_template is None:
        problem = "is missing"
    else:
        try:
            text = processor.chat(question, 1)
        except BadRequest as error:
            problem = f"takes no pictures ({error})"
        else:
            if "'type'" in text or '"type"' in text:
                problem = "takes text only: it prints a message's parts as a list"
            elif question not in text:
                problem = "leaves out the text of a message's parts"
            elif (count := text.count(processor.image_token)) != 1:
                problem = (
                    f"writes {processor.image_token} {count} times for one picture, which is token "
                    f"{processor.image_token_id} of the tokenizer and the model's token for images; template or "
                    "tokenizer may be another model's"
                )
    if problem:
        raise BadConfig(
            f"the chat template of {path!r} {problem}; copy this model's template for pictures into "
            f"chat_template.jinja (looked for in {_TEMPLATE_FILES}, then tokenizer_config.json)"
        )
    try:
        encoded = processor.encode(text, [Image.new("RGB", (64, 48))])
        shape = encoded.vision[0].fields["pixel_values"].shape
        problem = "" if _fits(processor, shape) else f"it makes pixel_values of shape {list(shape)} of a picture"
    except (VLoraError, KeyError, AttributeError, IndexError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise BadConfig(
            f"the image processor of {path!r} ({type(processor.image_processor).__name__}) does not fit the vision "
            f"tower of this {config.model_type} model: {problem}; copy preprocessor_config.json or "
            "processor_config.json of this model"
        )
    if encoded.prompt_ids.count(processor.image_token_id) != encoded.vision[0].num_tokens:
        raise BadConfig(
            f"the tokenizer of {path!r} does not read {processor.image_token} as token {processor.image_token_id}, "
            "which stands for images; copy tokenizer.json and tokenizer_config.json of this model"
        )


def _fits(processor: InputProcessor, shape: tuple[int, ...]) -> bool:
    """Whether pixel values of this shape are the vision tower's input."""
    vision = processor.config.vision_config
    if not processor.family.mrope:
        return shape[-2:] == (vision.image_size, vision.image_size) and (len(shape) == 5) == processor.family.tiles
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    return shape[1:] == (values,) and processor.image_processor.merge_size == vision.spatial_merge_size


def _part(path: str, name: str, files: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except VLoraError:
        raise
    except Exception as error:  # transformers raises errors of many types for malformed files
        reason = " ".join(str(error).split())
        short = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        raise BadConfig(
            f"cannot load the {name} of {path!r} ({files}): {type(error).__name__}: {short}; copy or download these "
            "files again"
        ) from error


def _warn_of_another_type(path: str, image_processor: Any) -> None:
    """Warn if the checkpoint names a type of image processor that transformers does not know."""
    try:
        stored = str(ImageProcessingMixin.get_image_processor_dict(path)[0].get("image_processor_type", ""))
    except (OSError, ValueError):
        return
    used = type(image_processor).__name__
    if stored and not used.startswith(stored.removesuffix("Fast")) and not stored.startswith(used):
        log.warning("%s: transformers has no image processor %s; the family's %s is used", path, stored, used)
