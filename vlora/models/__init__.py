"""The model side of the engine: loading, the adapter to transformers' models, vision, sampling, and the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.lazy import attributes

if TYPE_CHECKING:
    from vlora.models.processing import EncodedPrompt, InputProcessor
    from vlora.models.vision.images import Region

__all__ = ["EncodedPrompt", "InputProcessor", "Region"]

__getattr__ = attributes(
    __name__,
    EncodedPrompt="vlora.models.processing",
    InputProcessor="vlora.models.processing",
    Region="vlora.models.vision.images",
)
