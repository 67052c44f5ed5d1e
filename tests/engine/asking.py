"""Requests for engines in this process, and what their outputs amount to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.families import Prompt
from vlora.engine import Engine
from vlora.types import Request, RequestOutput, SamplingParams


def ask(
    prompt: Prompt, request_id: str = "r", adapter: str | None = None, num_tokens: int = 6, **fields: Any
) -> Request:
    """A greedy request for an answer of this length."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    own = {"prompt_ids": prompt.prompt_ids, "vision": prompt.vision, "sampling": sampling, **fields}
    return Request(request_id=request_id, adapter=adapter, **own)


def tokens(outputs: Iterable[RequestOutput], request_id: str | None = None) -> list[int]:
    """The tokens of one request, or of all outputs."""
    own = (output for output in outputs if request_id in (None, output.request_id))
    return [token for output in own for token in output.token_ids]


def finish(engine: Engine) -> list[RequestOutput]:
    """Step until all work is done."""
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    return outputs
