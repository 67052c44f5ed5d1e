"""Qwen-VL's image processor: the whole image is resized to a square, whatever its shape."""

from __future__ import annotations

import os
from typing import Any

from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from vlora.models.qwen_vl.config import QwenVLConfig


class QwenVLImageProcessor:
    """Makes the image processor of a checkpoint, which has no file for it; the instances are transformers' of CLIP."""

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **options: Any) -> CLIPImageProcessorPil:
        """The processor for the image size in a checkpoint's config.json. options: have no effect."""
        stored, _ = QwenVLConfig.get_config_dict(model)
        side = stored["vision_config"]["image_size"]
        return CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False)
