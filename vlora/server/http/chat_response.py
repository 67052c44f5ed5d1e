"""OpenAI's chat completion responses: complete, or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vlora.client.values import Answer, HeadResult, TokenLogprob
from vlora.server.detokenizer import Piece
from vlora.server.http.tools import ToolCallParser

_LEAST_LOGPROB = -9999.0  # as in OpenAI's answers: JSON has no infinity


class EventBuilder:
    """The events of one stream.

    head: the answer's id, time, model and kind. num_choices: of each prompt. counts: each event has the token counts so
    far, where a prompt counts once for all its choices.
    """

    def __init__(self, head: dict[str, Any], num_choices: int, counts: bool) -> None:
        self._head = head
        self._num_choices = num_choices
        self._counts = counts
        self._last: dict[int, Piece | Answer] = {}  # by choice

    def usage(self, answers: Sequence[Answer]) -> bytes:
        """The last event of a stream with usage."""
        return event({**self._head, "choices": [], "usage": usage(answers, self._num_choices)})

    def _event(self, index: int, choice: dict[str, Any], part: Piece | Answer | None = None) -> bytes:
        chunk = {**self._head, "choices": [{"index": index, **choice}]}
        if self._counts:
            if part is not None:
                self._last[index] = part
            prompts = {place // self._num_choices: last.num_prompt_tokens for place, last in self._last.items()}
            prompt, completion = sum(prompts.values()), sum(last.num_completion_tokens for last in self._last.values())
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            chunk["usage"] = counts
        return event(chunk)


class ChatResponseBuilder(EventBuilder):
    """Builds the responses to one request."""

    def __init__(
        self, head: dict[str, Any], num_choices: int, *, logprobs: bool, counts: bool = False, tools: bool = False
    ) -> None:
        super().__init__({**head, "object": "chat.completion.chunk"}, num_choices, counts)
        self._logprobs = logprobs
        self._tools = tools
        self._readers: dict[int, ToolCallParser] = {}  # by choice, in a stream

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._message(answer),
                "logprobs": self._scores(answer.logprobs),
                **how(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(answers)}

    def begin(self, index: int) -> bytes:
        """The event that opens a choice."""
        return self._delta(index, None, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> bytes:
        """The event with a choice's next text."""
        scores = self._scores(piece.logprobs)
        if not self._tools:
            return self._delta(index, piece, {"content": piece.text}, scores)
        reader = self._readers.setdefault(index, ToolCallParser())
        first = reader.num_calls
        text, calls = reader.feed(piece.text)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": first + place, **call.as_value()} for place, call in enumerate(calls)]
        return self._delta(index, piece, delta, scores) if delta or scores else b""

    def end(self, index: int, answer: Answer) -> bytes:
        """The event that closes a choice."""
        reader = self._readers.get(index)
        text = "" if reader is None else reader.finish()
        called = reader is not None and reader.num_calls > 0
        delta = {"content": text} if text else {}
        return self._delta(index, answer, delta, finish_reason=_reason(answer, called), **how(answer))

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if self._tools:
            reader = ToolCallParser()
            text, calls = reader.feed(answer.text)
            message["content"] = text + reader.finish()
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [call.as_value() for call in calls]
        return {"message": message, "finish_reason": _reason(answer, "tool_calls" in message)}

    def _delta(
        self,
        index: int,
        part: Piece | Answer | None,
        delta: dict[str, Any],
        scores: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"delta": delta, "finish_reason": finish_reason, "logprobs": scores, **more}
        return self._event(index, choice, part)

    def _scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **_score(token.token, token.logprob, token.data),
                "top_logprobs": [_score(*other, data) for other, data in zip(token.top, token.top_data, strict=True)],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def usage(answers: Sequence[Answer], num_choices: int | None = None) -> dict[str, Any]:
    """Token counts. A prompt counts once for all its choices; cached_tokens is the part of the prompt that the first
    choice took from the prefix cache, adapter_tokens the part that the adapter applies to.

    num_choices: Choices per prompt; None when all answers belong to one prompt.
    """
    firsts = answers[:: num_choices or len(answers)]
    prompt = sum(answer.num_prompt_tokens for answer in firsts)
    completion = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.timings.num_cached_tokens for answer in firsts),
            "adapter_tokens": sum(answer.timings.num_adapter_tokens for answer in firsts),
        },
    }


def how(answer: Answer) -> dict[str, Any]:
    """Which way answered, not part of OpenAI's API."""
    how = {"answered_by": answer.answered_by, "confidence": answer.confidence, "domain": answer.domain}
    return how if answer.result is None else {**how, "head": head_json(answer.result)}


def head_json(result: HeadResult) -> dict[str, Any]:
    """The JSON object of one result, with labels in place of label numbers."""
    form: dict[str, Any] = {
        "adapter": result.adapter,
        "head": result.head,
        "task": result.task,
        "label": result.label,
        "confidence": result.confidence,
        "total_s": result.total_s,
    }
    if result.label_id is not None:
        form["label_id"] = result.label_id
    if result.scores:
        form["scores"] = dict(zip(result.labels, result.scores, strict=True))
    match result.task:
        case "counting":
            form["count"] = result.count
        case "multi_label":
            form["chosen"] = [result.labels[label_id] for label_id in result.chosen]
        case "regression":
            form["values"] = dict(zip(result.labels, result.values, strict=True))
            form["deviations"] = dict(zip(result.labels, result.deviations, strict=True))
        case "detection":
            form["boxes"] = [msgspec.structs.asdict(box) for box in result.boxes]
    return form


def _reason(answer: Answer, called: bool) -> str:
    return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _score(token: str, logprob: float, data: bytes | None) -> dict[str, Any]:
    return {"token": token, "logprob": finite(logprob), "bytes": None if data is None else list(data)}
