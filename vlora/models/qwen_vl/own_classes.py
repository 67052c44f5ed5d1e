"""The classes that load a checkpoint of Qwen-VL, by the names of the transformers' classes in whose place they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlora.models.qwen_vl.config import QwenVLConfig
from vlora.models.qwen_vl.model import QwenVLForConditionalGeneration

BY_KIND: Mapping[str, Any] = {
    "AutoConfig": QwenVLConfig,
    "AutoModelForImageTextToText": QwenVLForConditionalGeneration,
}
