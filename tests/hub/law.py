"""What a server answers from a checkpoint, beside what transformers and PEFT answer: one word for each kind of request.

The requests are chat completions of the HTTP API, in process: `ChatRequest`, `InputProcessor` and `LocalEngine`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
from PIL import Image
from starlette.requests import Request as HttpRequest

from tests.engine.test_quantized_answers import EXACT, ExactInt4
from tests.harness import FixedModes
from tests.hub.checkpoints import CHECKPOINTS, SavedBy, make
from tests.hub.oracle import HEAD, Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine, quantize
from vlora.engine.model_check import ModelCheck, check_model
from vlora.errors import VLoraError
from vlora.models import stored_groups
from vlora.models.processing import InputProcessor
from vlora.models.vision.images import Clip
from vlora.server.http.chat_request import ChatRequest, conversation_of
from vlora.server.http.tools import as_messages
from vlora.server.prompts import Conversation, with_pictures
from vlora.types import Mode, Request, SamplingParams
from vlora.types.video import Video

NUM_TOKENS = 6
EQUAL = "equal"
ADAPTER = "all"
BODIES: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "requests.json").read_text())
"""Chat completions by kind. typed: texts with markers of images and videos, of which those that a family does not have
are text anyway.
"""
KINDS = (*BODIES, "adapter", "head")


def _visuals(kind: str, name: str) -> list[Image.Image | Clip]:
    """Pictures of several shapes, or frames of a size that the families' video processors keep."""
    rng = np.random.default_rng(len(kind))

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))

    if kind == "video":
        size = (96, 64) if name.startswith("Qwen3") else (336, 308)
        return [Clip([picture(*size) for _ in range(4)], [0.0, 0.5, 1.0, 1.5])]
    sizes = {
        "picture": [(90, 140)],
        "typed": [(64, 64)],
        "two pictures": [(150, 60), (64, 64)],
        "tools": [(64, 64)],
        "adapter": [(90, 140)],
        "head": [(90, 140)],
    }
    return [picture(*size) for size in sizes.get(kind, [])]


class Served:
    """A checkpoint in a folder, its check, and an engine that is loaded when a request needs it."""

    def __init__(self, name: str, folder: Path, plain: Path | None = None) -> None:
        """plain: the checkpoint with its weights restored, if they are quantized."""
        self.name, self.folder = name, folder
        self.oracle = Oracle(name, folder, plain or folder)
        self.adapter = folder.parent / "adapter"

    @classmethod
    def make(cls, name: str, saved_by: SavedBy, folder: Path) -> Served:
        plain = None
        if name in CHECKPOINTS and CHECKPOINTS[name].quantization not in (None, "bnb"):
            plain = make(name, folder / "plain", restored=True)
        return cls(name, make(name, folder / "model", saved_by), plain)

    def config(self, **settings: Any) -> EngineConfig:
        fields = {"model": str(self.folder), "dtype": "float32", "threads": 1, "arena_bytes": 128 << 20}
        return EngineConfig(**{**fields, **settings})

    def check(self) -> ModelCheck:
        return check_model(self.config(), adapter_rank=4, memory_bytes=4 << 30)

    @functools.cached_property
    def engine(self) -> LocalEngine:
        if self.name not in CHECKPOINTS or not CHECKPOINTS[self.name].quantization:
            return LocalEngine(self.config())
        # Merged weights are rounded again, and eight-bit products round their inputs (`tests/engine`).
        stored = mock.patch.object(stored_groups, "Grouped", ExactInt4)
        with mock.patch.object(quantize, "FORMATS", EXACT), stored:
            engine = LocalEngine(self.config())
        engine.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED)
        return engine

    @functools.cached_property
    def processor(self) -> InputProcessor:
        return InputProcessor.from_pretrained(str(self.folder))

    def answer(self, kind: str) -> str:
        """`EQUAL`, `refused: ...` with the reason, or the difference."""
        adapted = kind in ("adapter", "head")
        body = ChatRequest.model_validate({"model": "m", **BODIES["picture" if adapted else kind]})
        messages, _ = conversation_of(body.messages, HttpRequest({"type": "http"}))
        tools = [tool.model_dump(exclude={"function": {"strict"}}) for tool in body.offered]
        visuals = _visuals(kind, self.name)
        if tools and self.processor.takes_tools != self.oracle.takes_tools:
            return f"takes_tools is {self.processor.takes_tools}"
        if tools and not self.oracle.takes_tools:
            messages, tools = as_messages(messages, tools), []
        if not self.processor.takes_videos:  # as `PromptEncoder`
            videos = [Video(one.frames, one.times) for one in visuals if isinstance(one, Clip)]
            messages = [
                dict(each) for each in cast(Conversation, with_pictures(Conversation(messages), videos)).messages
            ]
            visuals = [each for one in visuals for each in (one.frames if isinstance(one, Clip) else [one])]
        try:
            text = self.processor.template(messages, tools) if tools else self.processor.template(messages)
            encoded = self.processor.encode(text, visuals)
        except VLoraError as error:
            return f"refused: {error}"
        inputs = self.oracle.prompt(messages, tools or None, visuals, typed=kind.startswith("typed"))
        want = inputs["input_ids"][0].tolist()
        if list(encoded.prompt_ids) != want:
            return _difference(self.processor, list(encoded.prompt_ids), want)
        if adapted and not self.adapter.exists():
            self.oracle.save_adapter(self.adapter)
            self.engine.engine.load_adapter(ADAPTER, str(self.adapter))
        request = Request(
            request_id=kind,
            prompt_ids=encoded.prompt_ids,
            vision=encoded.vision,
            adapter=ADAPTER if adapted else None,
            head=HEAD if kind == "head" else None,
            sampling=SamplingParams() if kind == "head" else self._sampling(),
        )
        outputs = self.engine.run([request])[kind]
        if outputs[-1].error is not None:
            return f"refused: {outputs[-1].error.message}"
        if kind == "head":
            assert outputs[-1].head is not None
            got, scores = outputs[-1].head.scores, self.oracle.scores(inputs)
            close = max(abs(one - two) for one, two in zip(got, scores, strict=True)) < 1e-4
            return EQUAL if close else f"scores {got} instead of {scores}"
        tokens = [token for output in outputs for token in output.token_ids]
        expected = self.oracle.generate(inputs, NUM_TOKENS, adapted=adapted)
        return EQUAL if tokens == expected else f"tokens {tokens} instead of {expected}"

    def _sampling(self) -> SamplingParams:
        """Greedy, with the penalty of the checkpoint's generation_config.json, which `generate` applies."""
        file = self.oracle.folder / "generation_config.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        return SamplingParams(max_tokens=NUM_TOKENS, repetition_penalty=stored.get("repetition_penalty", 1.0))


def _difference(processor: InputProcessor, got: list[int], want: list[int]) -> str:
    at = next(
        (place for place, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]),
        min(len(got), len(want)),
    )

    def shown(ids: list[int]) -> str:
        return repr(processor.tokenizer.decode(ids[max(0, at - 6) : at + 14]))

    return f"prompt differs at token {at} of {len(want)} ({len(got)}): {shown(got)} instead of {shown(want)}"
