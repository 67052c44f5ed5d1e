"""Requests: prompt, images, adapter, sampling parameters and bounds."""

from __future__ import annotations

import enum
import hashlib
import math
from typing import Annotated, Literal

import msgspec

from vlora.errors import BadRequest


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 65_536
MAX_PRIORITY = 10
MAX_PENALTY = 2.0  # OpenAI's range of frequency_penalty and presence_penalty
MAX_LOGIT_BIAS = 100.0  # OpenAI's range
MAX_BIASED_TOKENS = 1024
MAX_ITEMS = 4096  # of a list in a message; other limits are lower
MAX_INPUTS = 1024  # of one call for embeddings or scores
MAX_VISUALS = 256  # images and videos of a request, and frames of a video: their product bounds a message


Pooling = Literal["last", "mean"]
"""How the states of a prompt's tokens become its embedding: that of the last token, or the mean of all of them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of a request.

    Args:
        max_tokens: Maximum number of tokens in the answer.
        min_tokens: Minimum number of tokens before an end-of-sequence token or a stop string may end the answer.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the smallest set of most likely tokens with at least this total probability; 1 is off.
        top_k: Keep this many most likely tokens; 0 is off.
        min_p: Keep tokens with at least this share of the most likely token's probability; 0 is off.
        repetition_penalty: Divides positive logits, and multiplies negative logits, of every token in the prompt and
            the answer so far (CTRL, https://arxiv.org/abs/1909.05858); 1 is off.
        frequency_penalty: Subtracted from the logit of each token in the answer, once per occurrence.
        presence_penalty: Subtracted from the logit of each token in the answer, once.
        logit_bias: Pairs of a token id and the value added to its logit.
        seed: Draws depend on the seed and the token's index in the answer only, never on the batch. None derives the
            seed from the request id.
        stop: Strings that end the answer.
        ignore_eos: Whether end-of-sequence tokens do not end the answer.
        logprobs: Return each token's log probability and those of this many most likely tokens, from the model's
            logits without penalties and bias. None computes none.
        grammar: A Lark grammar (llguidance's dialect) that the answer matches unless it is cut off, or None.

    Raises:
        BadRequest: A value is out of range.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    seed: int | None = None
    stop: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        penalties = f"between {-MAX_PENALTY} and {MAX_PENALTY}"
        for field, valid, limits in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number, 0 or more (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0 (1 is off)"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, penalties),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, penalties),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens ({self.max_tokens})"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ):
            if not valid:
                raise BadRequest(f"{field} is {getattr(self, field)}; it must be {limits}", field=field)
        if (count := len(self.logit_bias)) > MAX_BIASED_TOKENS:
            raise BadRequest(
                f"logit_bias has {count} tokens; at most {MAX_BIASED_TOKENS} are allowed", field="logit_bias"
            )
        limits = f"between {-MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}"
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise BadRequest(f"logit_bias of token {token_id} is {bias}; it must be {limits}", field="logit_bias")
        if any(not text for text in self.stop):
            raise BadRequest("stop contains an empty string; a stop string needs at least one character", field="stop")
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise BadRequest(f"the grammar has {len(self.grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
        if self.grammar is not None and self.ignore_eos:
            raise BadRequest("ignore_eos cannot be combined with a grammar: the grammar determines where answers end")
        if self.grammar is not None and self.min_tokens:
            raise BadRequest(
                "min_tokens cannot be combined with a grammar (response_format, tools): the grammar determines where "
                "the answer ends; omit one of them",
                field="min_tokens",
            )


class TensorValue(msgspec.Struct, frozen=True):
    """A tensor as a value: `data` is C-contiguous, `dtype` is numpy's name of the type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class VisionInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video as the image processor returns it: the inputs of the vision tower for this item alone.

    content_hash: hex digest of the processed tensors; the cache key of its embeddings.
    num_tokens: number of placeholder tokens in the prompt.
    num_patches: cost of encoding the item, in patches of a small image: its patches, plus the cost of their attention,
    which grows with the square of their number. 0 until an engine computes it.
    """

    kind: Literal["image", "video"]
    content_hash: str
    num_tokens: int
    fields: dict[str, TensorValue]
    num_patches: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request ready for the engine: placeholders expanded, images processed.

    adapter: None uses the base model. Several adapters are composed: `a+b`, or `adapter_name` of weights.
    head: None generates text; otherwise the adapter's task head of that name answers in one pass.
    pooling: the answer is the prompt's embedding, in one pass too.
    max_latency_s: bound on the whole request, or None. If it is missed, the request fails.
    max_ttft_s: bound on the first token, or on the head's answer, or None. A request that cannot meet a bound is
    rejected up front; an admitted request is answered even if its first token is late.
    priority: waiting requests with a higher priority are scheduled first; from -MAX_PRIORITY to MAX_PRIORITY.
    tenant: the unit of fair sharing between callers; None for a caller without a token.
    whole: the caller reads the answer only when it is complete, so that all tokens may come in the last message.
    answered: tokens of the answer that another engine has computed; this one returns the later ones. Set the seed too.
    adapter_version: content hash that the adapter must have; None allows any.
    read_from: index of the first prompt token with a hidden state that is read. KV from there on is not reused. The
    engine sets it for heads that read image tokens, and for the mean of all; None is the last token.
    adapter_from: index of the first token that the adapter applies to; the base model computes those before it. The
    engine sets it for activated adapters (aLoRA).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionInput, ...] = ()
    adapter: str | None = None
    head: str | None = None
    pooling: Pooling | None = None
    sampling: SamplingParams = SamplingParams()
    max_latency_s: float | None = None
    max_ttft_s: float | None = None
    priority: int = 0
    read_from: int | None = None
    adapter_from: int = 0
    tenant: str | None = None
    whole: bool = False
    answered: tuple[int, ...] = ()
    adapter_version: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise BadRequest("the prompt is empty; send at least one token")
        if self.head is not None and self.adapter is None:
            raise BadRequest(f"head {self.head!r} needs an adapter; set the adapter that has this head")
        for field in ("max_latency_s", "max_ttft_s"):
            if (bound := getattr(self, field)) is not None and not bound > 0:
                raise BadRequest(f"{field} is {bound}; it must be above 0")
        check_priority(self.priority)

    @property
    def in_one_pass(self) -> bool:
        """Whether the pass over the prompt gives the whole answer: a head's, or an embedding."""
        return self.head is not None or self.pooling is not None


def seed_of(request_id: str, params: SamplingParams) -> int:
    if params.seed is not None:
        return params.seed
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def check_priority(priority: int) -> None:
    """Raises BadRequest if the priority is out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadRequest(f"priority is {priority}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}")
