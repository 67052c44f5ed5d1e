"""The model side of the engine: loading, the seam into transformers, vision, sampling, the runner, mode switching."""

from vlora.models.processing import EncodedPrompt, InputProcessor, Region

__all__ = ["EncodedPrompt", "InputProcessor", "Region"]
