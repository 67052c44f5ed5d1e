"""The nouns every room shares, as frozen values. No torch: a camera box imports this module.

All of them can cross a process boundary as msgpack (msgspec), so they hold numbers, strings, bytes and tuples only.
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
    """What a user may set about token choice.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch those filters off; min_p keeps the tokens with at least
    this share of the likeliest token's probability. Draws depend on `seed` and the token's place in the answer only,
    never on the batch; `seed=None` takes one from the request id.
    repetition_penalty divides positive logits, and multiplies negative ones, of every token of the prompt and the
    answer so far (CTRL, https://arxiv.org/abs/1909.05858); 1 is off. frequency_penalty and presence_penalty subtract
    from the logits of the answer's tokens: the first once per occurrence, the second once. logit_bias: pairs of token
    id and what is added to its logit.
    min_tokens: neither an end-of-sequence token nor a stop string ends the answer before it has so many tokens.
    logprobs: for every token its log probability and those of this many likeliest ones, from the model's logits without
    penalties and bias; None computes none.
    grammar: the answer's form as a Lark grammar (llguidance's dialect), or None. An answer that ends by itself has it.

    Raises BadRequest when a value is out of range.
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
            raise BadRequest(f"min_p is {self.min_p}; it must lie between 0 (off) and 1", field="min_p")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise BadRequest(
                f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0 (1 is off)",
                field="repetition_penalty",
            )
        for field in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, field)
            if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise BadRequest(
                    f"{field} is {penalty}; it must lie between {-MAX_PENALTY} and {MAX_PENALTY}", field=field
                )
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise BadRequest(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are read",
                field="logit_bias",
            )
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise BadRequest(
                    f"logit_bias of token {token_id} is {bias}; it must lie between {-MAX_LOGIT_BIAS} and "
                    f"{MAX_LOGIT_BIAS}",
                    field="logit_bias",
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens, which is {self.max_tokens}",
                field="min_tokens",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadRequest(f"logprobs is {self.logprobs}; it must lie between 0 and {MAX_LOGPROBS}", field="logprobs")
        if any(not text for text in self.stop):
            raise BadRequest("stop holds an empty string; every stop string needs at least one character", field="stop")
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise BadRequest(f"the grammar has {len(self.grammar)} characters; at most {MAX_GRAMMAR_CHARS} are read")
        if self.grammar is not None and self.ignore_eos:
            raise BadRequest("ignore_eos and grammar do not go together: the grammar says where the answer ends")
        if self.grammar is not None and self.min_tokens:
            raise BadRequest(
                "min_tokens and a grammar (response_format, tools) do not go together: the grammar says where the "
                "answer ends; leave one of them out",
                field="min_tokens",
            )


class TensorValue(msgspec.Struct, frozen=True):
    """A tensor as a value: `data` is C-contiguous, `dtype` is numpy's name for it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class VisionInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image or one video after the image processor: the tensors the model's vision tower takes, for this item
    alone.

    content_hash: hex digest over the processed tensors; the key under which its embeddings are cached.
    num_tokens: how many placeholder tokens of the prompt it fills.
    num_patches: work of encoding it, in patches of a small image: its patches, and what their attention to each other
    costs beside that, which grows with the square. 0 until an engine has computed it.
    """

    kind: Literal["image", "video"]
    content_hash: str
    num_tokens: int
    fields: dict[str, TensorValue]
    num_patches: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One user job, ready for the engine: placeholders expanded, images processed.

    adapter None is the base model. head None asks for text; otherwise the named task head of the adapter answers in
    one pass.
    max_latency_s: the caller's bound on the whole request, or None; a later answer is no answer.
    max_ttft_s: the caller's bound on the first token, or on the head's answer, or None. A request that cannot keep a
    bound is refused ahead of time; one that was let in is answered, even when its first token comes late after all.
    priority: who waits with a higher one comes first, from -MAX_PRIORITY to MAX_PRIORITY.
    tenant: on whose behalf, for fair shares; None where nobody showed a token.
    whole: nobody reads the answer before it is whole, so that all its tokens may come in the last message.
    read_from: the first prompt token whose hidden state is needed, so that from there on nothing is reused; the engine
    says it of heads that read image tokens. None: the last one.
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
            raise BadRequest(f"head {self.head!r} was asked for without an adapter; heads belong to adapters")
        for field in ("max_latency_s", "max_ttft_s"):
            bound = getattr(self, field)
            if bound is not None and not bound > 0:
                raise BadRequest(f"{field} is {bound}; it must be above 0")
        check_priority(self.priority)


def check_priority(priority: int) -> None:
    """Raises BadRequest for one out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadRequest(f"priority is {priority}; it must lie between {-MAX_PRIORITY} and {MAX_PRIORITY}")


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
    """One thing that a detection head found. score: how sure it is of it, 0 to 1.

    image: which of the request's pictures it is in, from 0. Edges are in shares (0 to 1) of that picture's width and
    height where the engine speaks, in pixels of the picture as it was sent (turned upright) where a client is told.
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
    """What a task head says. label: the answer in a few words, whatever the task. confidence: how likely it is right,
    0 to 1. labels: the head's own, which another version of its adapter may not share. The rest depends on the task:

    * classification, action, binary: label_id, and every label's probability in scores;
    * counting: count, and the probabilities of 0, 1, 2, ... in scores;
    * multi_label: chosen, the ids of all labels that hold, and every label's own probability in scores;
    * regression: values, one per label, and the standard deviation of each one's error in deviations;
    * detection: boxes, surest first.
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
    """How likely the model held a sampled token, before temperature and filters: natural logarithms.

    top: (token id, log probability) of the likeliest tokens, best first; as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went, in seconds from its arrival at the engine, and how it was run.

    ttft_s is None until something was answered. steps_by_mode counts the steps the request took part in.
    num_cached_tokens: of the prompt, those whose KV was found and not computed; 0 until something was answered.
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
    """One message of a request's answer. The last one has a finish_reason; exactly one such message ends every request.

    token_ids: the tokens since the previous message; scores: one per token where the request asked for logprobs. error
    is set when, and only when, finish_reason is "error" or "cancelled".
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

    answers: the step reaches the sequence's last known token, so a token is sampled or the head is read.
    """

    request_id: str
    adapter: str | None
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    answers: bool


class Encode(msgspec.Struct, frozen=True):
    """Images and videos that one call of the vision tower encodes, in as many steps as it takes.

    number: of the call; the same number in a later step continues the call. items: request ids and the places of their
    images in `Request.vision`. budget: patches to encode in this step (work done in pieces: the last one may exceed
    it). left: patches of the call that were not encoded before this step.
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
    """What a step did of an `Encode`. num_patches: encoded in this step, in `seconds`.

    done: the call is complete and its embeddings are kept for its requests. failed: it is over without a result; a call
    for one request then has its error in `StepResult.errors`, and the images of several are to be encoded one request
    at a time.
    """

    num_patches: float
    seconds: float
    done: bool = False
    failed: bool = False


class Batch(msgspec.Struct, frozen=True):
    """The scheduler's decision for one step. merged_adapter None means the base weights W0 are in place.

    preempted: requests whose KV blocks were taken back; they will be computed again from their tokens. encode: images
    to encode beside the items, of which there may then be none.
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
    """What one step brought: a token or a head's answer per answering request, errors for those that failed alone.

    in_place: merged weights are written over W0, so nothing but what is in place is at hand, and going back costs time.
    encoded: what became of the batch's `encode`; step_s includes its seconds.
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
    """What policies may know of memory. resident: adapters on the device. mergeable: those whose merge fidelity
    holds. loading: needed ones on their way or yet to be read; who waits for one of them does not wait for room."""

    resident: frozenset[str]
    mergeable: frozenset[str]
    loading: frozenset[str] = frozenset()


class HeadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One task head as clients see it. prompt is the question it was trained with; num_frames the images it expects."""

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered adapter as operators see it. version is the content hash; merge_fidelity 1.0 loses nothing.

    pinned: an operator keeps it on the device. sharding: how it lies on several ranks (replicated, slora, bd). loaded:
    its content was read, at load or at first use; until then version is empty, merge_fidelity 0 and mergeable False.
    error: why it cannot be served, once reading it has failed. num_loads: how often this content was loaded to the
    device.
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

    num_cancelled: ended by who asked, answers that met a stop string included. From arena_bytes to vision_cache_bytes:
    memory and caches, which the engine adds to what its scheduler counts.
    cached_blocks: of free_blocks, those whose content is kept for reuse; kv_bytes are those in use, cached_kv_bytes
    these. num_computed_tokens, num_reused_tokens: of prompts, computed and found in the prefix cache.
    num_step_tokens, num_needed_tokens: tokens of prompts and answers that steps computed, and those of them that were
    computed for the first time; the others had lost their KV to a preemption. num_waiting_for_kv: of num_waiting,
    requests for which there is no KV room yet, preempted ones included.
    host_adapter_bytes: adapters in host memory. num_restarts: processes of this engine that died before this one.
    relocated_bytes: copied within the arena, so that an adapter found room.
    num_adapter_hits, num_adapter_misses: requests whose adapter was on the device when they came, and not.
    highest_credit_s: the credit (V-LoRA section 4.4.3) of the request that has it highest; 0 where nobody waits.
    num_encoded_patches, encode_s: work of the vision tower (see `VisionInput.num_patches`), and how long it took.
    num_adapter_loads: how often one was brought to the device. num_load_waits, load_wait_s: steps in which every
    request waited for an adapter to be read or brought, and how long they waited. num_threads: that a step computes
    with, on each rank.
    arena_basis: what arena_bytes follows from, in words.
    atmm_table: the measured table that chooses kernels, in words; empty where there is no engine behind the numbers.
    cpu_kernels: "compiled", or "plain torch" without a C++ compiler that works; empty on a GPU.
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
