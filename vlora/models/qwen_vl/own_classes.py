"""The classes that load a checkpoint of Qwen-VL, in the place of transformers' Auto classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from vlora.models.qwen_vl.config import STORED_TYPE, QwenVLConfig
from vlora.models.qwen_vl.model import QwenVLForConditionalGeneration
from vlora.models.qwen_vl.tokenizer import QwenVLTokenizer


class QwenVLImageProcessor:
    """Makes the image processor of a checkpoint, which has no file for it; the instances are transformers' of CLIP."""

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **options: Any) -> CLIPImageProcessorPil:
        """The processor for the image size in a checkpoint's config.json. options: have no effect."""
        stored, _ = QwenVLConfig.get_config_dict(model)
        side = stored["vision_config"]["image_size"]
        return CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False)


_ALWAYS: Mapping[str, Any] = {
    "AutoConfig": QwenVLConfig,
    "AutoModelForImageTextToText": QwenVLForConditionalGeneration,
}
# A checkpoint that this project has saved has files that transformers reads.
_PUBLISHED: Mapping[str, Any] = {"AutoTokenizer": QwenVLTokenizer, "AutoImageProcessor": QwenVLImageProcessor}


def own_class(kind: Any, stored: Mapping[str, Any]) -> Any:
    """The class to load with.

    Args:
        kind: One of transformers' Auto classes, returned where it can load the checkpoint.
        stored: The checkpoint's config.json.
    """
    published = _PUBLISHED if stored["model_type"] == STORED_TYPE else {}
    return {**_ALWAYS, **published}.get(kind.__name__, kind)
