"""The engine as learning uses it: evaluations are requests of the lowest priority."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from vlora.config import ServerConfig
from vlora.engine.interface import EngineInterface
from vlora.errors import BadRequest, UnknownAdapter
from vlora.server.active_requests import RequestClock
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.detokenizer import AnswerText
from vlora.server.prompt_encoder import PromptEncoder
from vlora.types import MAX_PRIORITY, Request, SamplingParams, TrainingStatus

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor


class EngineModel:
    def __init__(
        self,
        engine: EngineInterface,
        adapters: AdapterCatalog,
        encoder: PromptEncoder,
        processor: InputProcessor,
        config: ServerConfig,
    ) -> None:
        """The arguments are parts of the front end."""
        self._engine = engine
        self._adapters = adapters
        self._encoder = encoder
        self._processor = processor
        self._config = config

    async def answer(self, question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        clock = RequestClock(self._config.request_timeout_s)
        encoded = await self._encoder.encode(question, () if image is None else [image], clock)
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_ids=encoded.prompt_ids,
            vision=encoded.vision,
            adapter=adapter,
            adapter_version=version,
            sampling=SamplingParams(max_tokens=len(label.encode()) + 1),  # a token has a byte at least
            priority=-MAX_PRIORITY,
            whole=True,
        )
        text = AnswerText(self._processor.decode, self._processor.token_text, (), 0)
        with clock.bound():
            async for output in self._engine.generate(request, clock.deadline):
                text.feed(output.token_ids, output.scores)
                if output.error is not None:
                    raise output.error.to_exception()
        text.finish()
        return text.text

    def check_label(self, label: str) -> None:
        for token in self._processor.special_tokens:
            if token in label:
                raise BadRequest(
                    f"the label has the model's special token {token!r}; send the text of the answer", field="label"
                )

    async def load(self, name: str, folder: Path) -> str:
        """See `ServedModel`. A pinned adapter is pinned again."""
        if name not in self._adapters.learning:
            self._adapters.hidden.add(name)
        is_pinned = False
        with contextlib.suppress(UnknownAdapter):
            is_pinned = (await self._adapters.current(name)).pinned
        if not is_pinned:
            return (await self._adapters.replace(name, str(folder))).version
        await self._engine.pin_adapter(name, False)
        try:
            return (await self._adapters.replace(name, str(folder))).version
        finally:  # the version before, if the other one cannot be loaded
            with contextlib.suppress(UnknownAdapter):  # it was unloaded meanwhile
                await self._engine.pin_adapter(name, True)

    async def check(self, name: str) -> None:
        if (status := await self._adapters.current(name)).heads:
            heads = ", ".join(head.name for head in status.heads)
            raise BadRequest(
                f"adapter {name!r} has task heads ({heads}), which later versions would lack; it cannot learn"
            )

    async def unload(self, name: str) -> None:
        with contextlib.suppress(UnknownAdapter):
            await self._engine.unload_adapter(name)
        self._adapters.invalidate()

    async def train(self, plan: Path) -> None:
        """See `ServedModel`. A training that was cancelled or has failed remains so."""
        await self._engine.train(str(plan), reopen=False)

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        return await self._engine.trainings()
