"""Common fields of HTTP text requests: handling of unknown fields, service level, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from vlora.errors import BadRequest
from vlora.server.detokenizer import MAX_STOP_STRINGS
from vlora.types import MAX_PRIORITY, SamplingParams, adapter_name

MAX_CHOICES = 16
MAX_TOKENS = 2**31 - 1  # above the context of any model
_SHOWN = 64  # characters of an unknown field's name
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_AS_THEY_ARE = ("min_tokens", "ignore_eos", "temperature", "top_p", "min_p", *_PENALTIES, "seed")

_LABELS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that label a request and never change its answer: accepted and ignored."""

_INSTEAD = {
    "bad_words": "forbid tokens with logit_bias",
    "best_of": "use n",
    "conversation": "send the whole conversation",
    "chat_template": "the server uses the template of the model's folder",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use response_format with a schema that has an enum",
    "guided_grammar": "use response_format with type 'json_schema'",
    "guided_json": "use response_format with type 'json_schema'",
    "guided_regex": "use response_format with a schema that has a pattern",
    "length_penalty": "beam search is not supported; use n and temperature",
    "modalities": "answers are text; leave it out",
    "audio": "answers are text; leave it out",
    "previous_response_id": "send the whole conversation",
    "prediction": "leave it out; answers are the same without it",
    "prompt_logprobs": "logprobs covers the answer's tokens",
    "reasoning_effort": "leave it out; ask for the reasoning in the prompt",
    "stop_token_ids": "use stop",
    "structured_outputs": "use response_format with type 'json_schema'",
    "tools": "use /v1/chat/completions",
    "suffix": "text is completed at its end only; leave it out",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "beam search is not supported; use n and temperature",
    "verbosity": "leave it out; limit the answer with max_tokens",
    "web_search_options": "leave it out; put what the model needs into the prompt",
}
"""Fields of OpenAI's and vLLM's APIs that are not supported, and the alternative."""


class StrictModel(BaseModel):
    """A model that refuses unknown fields, because ignoring one would change the answer. null is a field's default.

    WITHOUT_EFFECT: unsupported fields, with the values that have no effect. Errors name only the first unknown field: a
    body may have a million of them.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def drop_fields_without_effect(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {name: value for name, value in fields.items() if not cls.has_no_effect(name, value)}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        return {name: value for name, value in kept.items() if name in cls.model_fields or name == unknown}

    @classmethod
    def has_no_effect(cls, name: str, value: Any) -> bool:
        """Whether a field's value equals the behaviour without the field."""
        return value is None or value in cls.WITHOUT_EFFECT.get(name, ())


class ServiceLevelFields(StrictModel):
    """A request's service level, not part of OpenAI's API.

    max_latency_s: the answer is useless after this many seconds. priority: requests with a higher value run first.
    """

    max_latency_s: float | None = Field(None, gt=0)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class StreamOptions(StrictModel):
    """include_usage: the last event of the stream has the token counts. continuous_usage_stats: each event has the
    counts so far (vLLM extension)."""

    WITHOUT_EFFECT: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _model_name(value: Any) -> Any:
    """The name of a composition that is given as an object of weights. Raises BadRequest."""
    try:
        return adapter_name(value) if isinstance(value, dict) else value
    except BadRequest as error:
        error.field = "model"
        raise


_MODEL_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "number"}}],
    "description": "The base model, an adapter, or a composition: 'a+b', '0.7*a+0.3*b' or {'a': 0.7, 'b': 0.3}.",
}


class ModelFields(ServiceLevelFields):
    """model: the base model's name, an adapter's or a composition's."""

    model: Annotated[str, BeforeValidator(_model_name), WithJsonSchema(_MODEL_SCHEMA)]

    @classmethod
    def has_no_effect(cls, name: str, value: Any) -> bool:
        if name in _LABELS or super().has_no_effect(name, value):
            return True
        if name in _INSTEAD and name not in cls.model_fields:
            raise BadRequest(f"{name}: this field is not supported; {_INSTEAD[name]}", field=name)
        return False


class RequestFields(ModelFields):
    """A request for text. max_ttft_s: bound on the time to first token, in seconds."""

    temperature: float = 0.0
    top_p: float = 1.0
    stream: bool = False
    max_ttft_s: float | None = Field(None, gt=0)


class SamplingFields(RequestFields):
    """ignore_eos, min_tokens, top_k, min_p, repetition_penalty: as in vLLM."""

    max_tokens: int | None = Field(None, le=MAX_TOKENS)
    min_tokens: int = Field(0, le=MAX_TOKENS)
    ignore_eos: bool = False
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = Field({}, description="Value added to the logit of each token id.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions = StreamOptions()

    def sampling_of(
        self, max_tokens: int | None, *, name: str = "max_tokens", logprobs: int | None, grammar: str | None = None
    ) -> SamplingParams:
        """The sampling parameters, with a token limit from the field `name`; None means the default limit.

        Raises:
            BadRequest: A value is out of range.
        """
        limit = SamplingParams().max_tokens if max_tokens is None else max_tokens
        if limit < 1:
            raise BadRequest(f"{name} is {limit}; it must be at least 1", field=name)
        return SamplingParams(
            # min_tokens raises the default limit.
            max_tokens=max(limit, self.min_tokens) if max_tokens is None else limit,
            top_k=max(0, self.top_k),  # -1 means off in vLLM
            logit_bias=tuple((_token_id(token), bias) for token, bias in self.logit_bias.items()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
            grammar=grammar,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and int(key[:_SHOWN]) < 2**31):
        raise BadRequest(f"logit_bias has key {key[:_SHOWN]!r}; keys are token ids such as '42'", field="logit_bias")
    return int(key)
