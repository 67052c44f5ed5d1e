"""The classes that load a checkpoint of Qwen-VL, in the place of transformers' Auto classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlora.models.qwen_vl.config import STORED_TYPE, QwenVLConfig
from vlora.models.qwen_vl.model import QwenVLForConditionalGeneration

_ALWAYS: Mapping[str, Any] = {
    "AutoConfig": QwenVLConfig,
    "AutoModelForImageTextToText": QwenVLForConditionalGeneration,
}


def own_class(kind: Any, stored: Mapping[str, Any]) -> Any:
    """The class to load with.

    Args:
        kind: One of transformers' Auto classes, returned where it can load the checkpoint.
        stored: The checkpoint's config.json.
    """
    return _ALWAYS.get(kind.__name__, kind)
