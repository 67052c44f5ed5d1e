"""The files of a checkpoint that turn prompts and pictures into inputs: where each part is found.

transformers' own processors need torchvision, so their parts are loaded one by one, from the places where transformers
looks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from transformers import AutoConfig, AutoTokenizer
from transformers.image_processing_base import ImageProcessingMixin

# Imported from its own module: without torchvision, older versions export a placeholder that raises an error.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.processing_utils import ProcessorMixin

from vlora.errors import BadConfig, VLoraError
from vlora.models.pretrained import from_pretrained
from vlora.models.vision.videos import video_settings

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REASON = 300  # characters of an error of transformers, which may list all model types
TEMPLATE_FILES = "processor_config.json, chat_template.json, chat_template.jinja"


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
    stored = _part(path, "chat template", TEMPLATE_FILES, lambda: ProcessorMixin.get_processor_dict(path)[0])
    template = stored.get("chat_template")
    if isinstance(template, str) or (isinstance(template, dict) and "default" in template):
        tokenizer.chat_template = template  # of several, one is for tools
    videos = _part(
        path, "video processor", "video_preprocessor_config.json or processor_config.json", lambda: video_settings(path)
    )
    _warn_of_another_type(path, image_processor)
    return ProcessorParts(config, tokenizer, image_processor, videos)


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
