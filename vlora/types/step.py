"""One step: the scheduler's decision, and the runner's result."""

from __future__ import annotations

import enum

import msgspec

from vlora.types.output import ErrorValue, HeadAnswer, TokenScore


class Mode(enum.StrEnum):
    """How the adapters of a step are applied (V-LoRA section 4.4; `docs/architecture.md` has the table)."""

    UNMERGED = "unmerged"
    MERGED = "merged"
    MIXED = "mixed"


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
        return min(self.budget, self.left)


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an `Encode` in one step. num_patches: patches encoded in this step, in `seconds`.

    done: the call is complete and its requests have their embeddings. failed: the call ended without a result. If it
    was for one request, `StepResult.errors` has the error; the images of several requests must then be encoded one
    request at a time.
    """

    num_patches: float
    seconds: float = 0.0
    done: bool = False
    failed: bool = False


class Batch(msgspec.Struct, frozen=True):
    """The scheduler's decision for one step. merged_adapter: None runs with the base weights W0.

    preempted: requests that lost their KV blocks; their KV is recomputed from their tokens. encode: images to encode
    in addition to the items, which may then be empty. saved_s: see `vlora.orchestrator.Decision`.
    """

    mode: Mode
    merged_adapter: str | None
    items: tuple[BatchItem, ...]
    preempted: tuple[str, ...] = ()
    encode: Encode | None = None
    saved_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one step: a token or a head's answer per answering request, and errors of requests that failed alone.

    in_place: merged weights overwrite W0, so every switch, including the one back to W0, is a pass over the weights.
    encoded: progress of the batch's `encode`; step_s includes its seconds. launched: the host launched each kernel,
    unlike in steps that are CUDA graphs.
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
    launched: bool = False
