"""Requests with known answers, for a simulation that checks them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from vlora.types import Request, SamplingParams, VisionInput

EOS = 0
IMAGE_TOKEN = 1000  # placeholder
PATCHES_PER_TOKEN = 4
_VOCABULARY = 40


def make_request(
    request_id: str,
    adapter: str | None = None,
    *,
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 4,
    head: str | None = None,
    ignore_eos: bool = True,
    max_latency_s: float | None = None,
    images: Sequence[tuple[str, int]] = (),
    max_ttft_s: float | None = None,
    priority: int = 0,
    tenant: str | None = None,
    adapter_from: int = 0,
) -> Request:
    """A request; arguments that are not listed are those of `Request`.

    request_id: determines the answer, see `sampled_token`. prompt: the number of tokens, or the tokens. One
    `IMAGE_TOKEN` stands for each token of an image. images: (content, number of tokens) of each, in order.
    """
    vision = tuple(
        VisionInput(
            kind="image", content_hash=content, num_tokens=number, num_patches=PATCHES_PER_TOKEN * number, fields={}
        )
        for content, number in images
    )
    return Request(
        request_id=request_id,
        prompt_ids=tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt,
        vision=vision,
        adapter=adapter,
        head=head,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        max_latency_s=max_latency_s,
        max_ttft_s=max_ttft_s,
        priority=priority,
        tenant=tenant,
        adapter_from=adapter_from,
    )


def sampled_token(request_id: str, index: int) -> int:
    """The token at an index of a request's answer. It depends on nothing else."""
    return zlib.crc32(f"{request_id}/{index}".encode()) % _VOCABULARY


def expected_tokens(request: Request) -> list[int]:
    """The answer to a request, whatever the scheduling."""
    tokens = []
    for index in range(request.sampling.max_tokens):
        tokens.append(sampled_token(request.request_id, index))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            break
    return tokens
