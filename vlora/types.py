"""Shared data types, as frozen values. This module does not import torch, because clients import it.

All types can be sent between processes as msgpack (msgspec), so they hold numbers, strings, bytes and tuples only.
"""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from vlora.errors import BadRequest, VLoraError, error_from_code


class Mode(enum.StrEnum):
    """How the adapters of a step are applied (V-LoRA section 4.4; `docs/architecture.md` has the table)."""

    UNMERGED = "unmerged"
    MERGED = "merged"
    MIXED = "mixed"


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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}; it must be at least 1", field="max_tokens")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadRequest(
                f"temperature is {self.temperature}; it must be a finite number, 0 or more (0 is greedy)",
                field="temperature",
            )
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1", field="top_p")
        if self.top_k < 0:
            raise BadRequest(f"top_k is {self.top_k}; it must be 0 (off) or more", field="top_k")
        if not 0 <= self.min_p <= 1:
            raise BadRequest(f"min_p is {self.min_p}; it must be between 0 (off) and 1", field="min_p")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise BadRequest(
                f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0 (1 is off)",
                field="repetition_penalty",
            )
        for field in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, field)
            if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise BadRequest(
                    f"{field} is {penalty}; it must be between {-MAX_PENALTY} and {MAX_PENALTY}", field=field
                )
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise BadRequest(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed",
                field="logit_bias",
            )
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise BadRequest(
                    f"logit_bias of token {token_id} is {bias}; it must be between {-MAX_LOGIT_BIAS} and "
                    f"{MAX_LOGIT_BIAS}",
                    field="logit_bias",
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens ({self.max_tokens})",
                field="min_tokens",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadRequest(f"logprobs is {self.logprobs}; it must be between 0 and {MAX_LOGPROBS}", field="logprobs")
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

    adapter: None uses the base model. head: None generates text; otherwise the adapter's task head of that name answers
    in one pass.
    max_latency_s: bound on the whole request, or None. If it is missed, the request fails.
    max_ttft_s: bound on the first token, or on the head's answer, or None. A request that cannot meet a bound is
    rejected up front; an admitted request is answered even if its first token is late.
    priority: waiting requests with a higher priority are scheduled first; from -MAX_PRIORITY to MAX_PRIORITY.
    tenant: the unit of fair sharing between callers; None for a caller without a token.
    whole: the caller reads the answer only when it is complete, so that all tokens may come in the last message.
    read_from: index of the first prompt token with a hidden state that is read. KV from there on is not reused. The
    engine sets it for heads that read image tokens; None is the last token.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionInput, ...] = ()
    adapter: str | None = None
    head: str | None = None
    sampling: SamplingParams = SamplingParams()
    max_latency_s: float | None = None
    max_ttft_s: float | None = None
    priority: int = 0
    read_from: int | None = None
    tenant: str | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise BadRequest("the prompt is empty; send at least one token")
        if self.head is not None and self.adapter is None:
            raise BadRequest(f"head {self.head!r} needs an adapter; set the adapter that has this head")
        for field in ("max_latency_s", "max_ttft_s"):
            bound = getattr(self, field)
            if bound is not None and not bound > 0:
                raise BadRequest(f"{field} is {bound}; it must be above 0")
        check_priority(self.priority)


def check_priority(priority: int) -> None:
    """Raises BadRequest if the priority is out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadRequest(f"priority is {priority}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}")


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
    """The answer of a task head.

    label: the answer in a few words, for every task. confidence: estimated probability that it is right, 0 to 1.
    labels: the head's labels, which may differ in another version of the adapter. The other fields depend on the task:

    * classification, action, binary: label_id, and every label's probability in scores;
    * counting: count, and the probabilities of 0, 1, 2, ... in scores;
    * multi_label: chosen, the ids of all labels that apply, and every label's own probability in scores;
    * regression: values, one per label, and the standard deviation of each value's error in deviations;
    * detection: boxes, in order of decreasing score.
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
    """

    queue_s: float
    ttft_s: float | None
    latency_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    num_preemptions: int
    steps_by_mode: dict[str, int]
    num_cached_tokens: int = 0


FinishReason = Literal["stop", "length", "head", "cancelled", "error"]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a request's answer. Every request ends with exactly one message that has a finish_reason.

    token_ids: the tokens since the previous message. scores: one per token if the request asked for logprobs. error:
    set if and only if finish_reason is "error" or "cancelled".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    head: HeadAnswer | None = None
    finish_reason: FinishReason | None = None
    error: ErrorValue | None = None
    timings: Timings | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class BatchItem(msgspec.Struct, frozen=True):
    """One request's share of a step: tokens `[start, start + num_tokens)` of its prompt-and-answer sequence.

    answers: the step reaches the last known token of the sequence, so a token is sampled or the head is read.
    """

    request_id: str
    adapter: str | None
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    answers: bool


class Encode(msgspec.Struct, frozen=True):
    """Images and videos that one call of the vision tower encodes, in one or more steps.

    number: id of the call; the same number in a later step continues the call. items: pairs of a request id and an
    index in its `Request.vision`. budget: patches to encode in this step; the last piece of work may exceed it. left:
    patches of the call that were not encoded before this step.
    """

    number: int
    items: tuple[tuple[str, int], ...]
    budget: float
    left: float

    @property
    def num_patches(self) -> float:
        """Patches expected to be encoded in this step."""
        return min(self.budget, self.left)


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an `Encode` in one step. num_patches: patches encoded in this step, in `seconds`.

    done: the call is complete and its requests have their embeddings. failed: the call ended without a result. If it
    was for one request, `StepResult.errors` has the error; the images of several requests must then be encoded one
    request at a time.
    """

    num_patches: float
    seconds: float
    done: bool = False
    failed: bool = False


class Batch(msgspec.Struct, frozen=True):
    """The scheduler's decision for one step. merged_adapter: None runs with the base weights W0.

    preempted: requests that lost their KV blocks; their KV is recomputed from their tokens. encode: images to encode
    in addition to the items, which may then be empty.
    """

    mode: Mode
    merged_adapter: str | None
    items: tuple[BatchItem, ...]
    preempted: tuple[str, ...] = ()
    encode: Encode | None = None

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one step: a token or a head's answer per answering request, and errors of requests that failed alone.

    in_place: merged weights overwrite W0, so every switch, including the one back to W0, is a pass over the weights.
    encoded: progress of the batch's `encode`; step_s includes its seconds.
    """

    tokens: dict[str, int] = {}
    scores: dict[str, TokenScore] = {}
    heads: dict[str, HeadAnswer] = {}
    errors: dict[str, ErrorValue] = {}
    step_s: float = 0.0
    switch_s: float = 0.0
    switched: bool = False
    in_place: bool = False
    encoded: Encoded | None = None


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter memory state for policies.

    resident: adapters on the device. mergeable: adapters with sufficient merge fidelity. loading: needed adapters
    that are being read or loaded; requests for them wait for the load, not for free memory.
    """

    resident: frozenset[str]
    mergeable: frozenset[str]
    loading: frozenset[str] = frozenset()


class HeadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One task head as clients see it. prompt: the question it was trained with. num_frames: images it expects."""

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered adapter as operators see it. version: content hash. merge_fidelity: 1.0 is lossless.

    pinned: an operator keeps it on the device. sharding: its sharding on several ranks (replicated, slora, bd). loaded:
    its content was read, at load or at first use; until then version is empty, merge_fidelity 0 and mergeable False.
    error: why it cannot be served, after reading failed. num_loads: number of loads of this content to the device.
    """

    name: str
    version: str
    rank: int
    num_bytes: int
    resident: bool
    mergeable: bool
    merge_fidelity: float
    touches_vision: bool
    heads: tuple[HeadSummary, ...]
    pinned: bool = False
    sharding: str | None = None
    loaded: bool = True
    error: str | None = None
    num_loads: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started. requests_by_mode counts a request under each mode it took a step in.

    num_cancelled: requests ended by the caller, including answers that reached a stop string. Fields from arena_bytes
    to vision_cache_bytes: memory and caches, which the engine adds to the scheduler's counters.
    cached_blocks: free blocks with content that is kept for reuse. kv_bytes: KV blocks in use. cached_kv_bytes: KV of
    cached_blocks. num_computed_tokens, num_reused_tokens: prompt tokens computed, and found in the prefix cache.
    num_step_tokens: tokens of prompts and answers that steps computed. num_needed_tokens: those computed for the first
    time; the others lost their KV in a preemption. num_waiting_for_kv: waiting requests without enough free KV
    blocks, including preempted ones.
    host_adapter_bytes: adapters in host memory. num_restarts: earlier processes of this engine that died.
    relocated_bytes: bytes moved within the arena to make room for adapters.
    num_adapter_hits, num_adapter_misses: requests that found, or did not find, their adapter on the device at arrival.
    highest_credit_s: highest credit of any request (V-LoRA section 4.4.3); 0 if none waits.
    num_encoded_patches, encode_s: work of the vision tower (see `VisionInput.num_patches`), and its duration.
    num_adapter_loads: adapter loads to the device. num_load_waits, load_wait_s: steps in which every request waited for
    an adapter to be read or loaded, and the total wait. num_threads: threads that compute a step, on each rank.
    arena_basis: description of how arena_bytes was determined.
    atmm_table: description of the measured table that selects kernels; empty if there is no engine.
    cpu_kernels: "compiled", or "plain torch" without a working C++ compiler; empty on a GPU.
    """

    model: str
    num_steps: int
    steps_by_mode: dict[str, int]
    requests_by_mode: dict[str, int]
    num_switches: int
    switch_s: float
    num_waiting: int
    num_running: int
    num_finished: int
    num_failed: int
    num_preemptions: int
    free_blocks: int
    total_blocks: int
    arena_bytes: int = 0
    kv_bytes: int = 0
    adapter_bytes: int = 0
    num_adapters: int = 0
    num_resident_adapters: int = 0
    num_vision_hits: int = 0
    num_vision_encoded: int = 0
    vision_cache_bytes: int = 0
    num_cancelled: int = 0
    cached_blocks: int = 0
    cached_kv_bytes: int = 0
    num_computed_tokens: int = 0
    num_reused_tokens: int = 0
    num_step_tokens: int = 0
    num_needed_tokens: int = 0
    num_waiting_for_kv: int = 0
    host_adapter_bytes: int = 0
    relocated_bytes: int = 0
    num_adapter_loads: int = 0
    num_load_waits: int = 0
    load_wait_s: float = 0.0
    num_restarts: int = 0
    num_adapter_hits: int = 0
    num_adapter_misses: int = 0
    highest_credit_s: float = 0.0
    arena_basis: str = ""
    atmm_table: str = ""
    cpu_kernels: str = ""
    num_threads: int = 1
    num_encoded_patches: float = 0.0
    encode_s: float = 0.0
