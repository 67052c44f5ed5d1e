"""Shared data types, as frozen values. This module does not import torch, because clients import it.

All types can be sent between processes as msgpack (msgspec), so they hold numbers, strings, bytes and tuples only.
"""

from vlora.types.composition import adapter_name, composed_of, is_composed
from vlora.types.output import ErrorValue, FinishReason, FoundBox, HeadAnswer, RequestOutput, Timings, TokenScore
from vlora.types.request import (
    MAX_BIASED_TOKENS,
    MAX_GRAMMAR_CHARS,
    MAX_ITEMS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    Request,
    RequestStatus,
    SamplingParams,
    TensorValue,
    VisionInput,
    check_priority,
    seed_of,
)
from vlora.types.status import AdapterStatus, EngineStats, HeadSummary, MemoryView
from vlora.types.step import Batch, BatchItem, Encode, Encoded, Mode, StepResult
from vlora.types.training import TrainingStatus

__all__ = [
    "MAX_BIASED_TOKENS",
    "MAX_GRAMMAR_CHARS",
    "MAX_ITEMS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_PRIORITY",
    "AdapterStatus",
    "Batch",
    "BatchItem",
    "Encode",
    "Encoded",
    "EngineStats",
    "ErrorValue",
    "FinishReason",
    "FoundBox",
    "HeadAnswer",
    "HeadSummary",
    "MemoryView",
    "Mode",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "StepResult",
    "TensorValue",
    "Timings",
    "TokenScore",
    "TrainingStatus",
    "VisionInput",
    "adapter_name",
    "check_priority",
    "composed_of",
    "is_composed",
    "seed_of",
]
