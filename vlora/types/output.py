"""Answers: tokens, results of task heads, errors and timings."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlora.errors import VLoraError, error_from_code


class ErrorValue(msgspec.Struct, frozen=True):
    """A `VLoraError` as a value: its class's `code` and its message."""

    code: str
    message: str

    @classmethod
    def of(cls, error: VLoraError) -> ErrorValue:
        return cls(error.code, str(error))

    def to_exception(self) -> VLoraError:
        return error_from_code(self.code, self.message)


class FoundBox(msgspec.Struct, frozen=True, kw_only=True):
    """One object that a detection head found. score: confidence, 0 to 1.

    image: index of the request's image that contains it, from 0. The engine gives edges as shares (0 to 1) of that
    image's width and height; clients receive them in pixels of the image as sent (after EXIF rotation).
    """

    label: str
    label_id: int
    score: float
    left: float
    top: float
    right: float
    bottom: float
    image: int = 0


class HeadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a task head, or an embedding.

    label: the answer in a few words, for every task. confidence: estimated probability that it is right, 0 to 1.
    labels: the head's labels, which may differ in another version of the adapter. The other fields depend on the task:

    * classification, action, binary: label_id, and every label's probability in scores;
    * counting: count, and the probabilities of 0, 1, 2, ... in scores;
    * multi_label: chosen, the ids of all labels that apply, and every label's own probability in scores;
    * regression: values, one per label, and the standard deviation of each value's error in deviations;
    * detection: boxes, in order of decreasing score;
    * embedding: values, the pooled state with length 1; it has no label.
    """

    task: str
    label: str
    confidence: float
    labels: tuple[str, ...]
    scores: tuple[float, ...] = ()
    label_id: int | None = None
    count: int | None = None
    chosen: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    boxes: tuple[FoundBox, ...] = ()


class TokenScore(msgspec.Struct, frozen=True):
    """Natural log probability of a sampled token, before temperature and filters.

    top: (token id, log probability) of the most likely tokens, best first; as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one request, in seconds from its arrival at the engine, and its execution statistics.

    ttft_s: None until the first answer. steps_by_mode: number of steps the request took part in.
    num_cached_tokens: prompt tokens with KV from the prefix cache; 0 until the first answer.
    num_adapter_tokens: prompt tokens that the adapter applies to. All of them for an ordinary adapter; for an activated
    one (aLoRA) those from its invocation on, 0 if the prompt does not contain it and the base model answered.
    num_moves, num_deaths: how often the request continued on another replica, and how often its replica died.
    """

    queue_s: float
    ttft_s: float | None
    latency_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    num_preemptions: int
    steps_by_mode: dict[str, int]
    num_cached_tokens: int = 0
    num_adapter_tokens: int = 0
    num_moves: int = 0
    num_deaths: int = 0


FinishReason = Literal["stop", "length", "head", "cancelled", "error"]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a request's answer. Every request ends with exactly one message that has a finish_reason.

    token_ids: the tokens since the previous message. scores: one per token if the request asked for logprobs. error:
    set if and only if finish_reason is "error" or "cancelled". adapter_version: content hash of the request's adapter,
    in the first message of an engine process, for `Request.adapter_version`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    head: HeadAnswer | None = None
    finish_reason: FinishReason | None = None
    error: ErrorValue | None = None
    timings: Timings | None = None
    adapter_version: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
