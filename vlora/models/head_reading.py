"""Answers in one pass: the logits of task heads and the states of embeddings, kept until a prompt is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import atmm
from heads import Answer, TaskHead
from vlora.errors import StepFailed
from vlora.lora.adapter_pool import AdapterPool
from vlora.models.forward_batch import ForwardBatch, Row
from vlora.models.request_state import RequestState
from vlora.models.vision.token_grids import image_grids
from vlora.types import ErrorValue, FoundBox, HeadAnswer


def read_heads(
    packed: ForwardBatch, pool: AdapterPool, config: Any
) -> tuple[dict[str, HeadAnswer], dict[str, ErrorValue]]:
    """Read all heads of all adapters in one call, and the states for embeddings in another one.

    A prompt may be computed in chunks. For several tokens of it, each step reads those that it computed.

    Returns:
        By request id: the answers of requests that reach the end of their prompt in this step, and the errors of
        requests that failed alone.
    """
    rows: dict[_Key, list[Row]] = {}
    pooled: list[Row] = []
    for row in packed.head_rows:
        request = row.state.request
        if request.adapter is not None and request.head is not None:
            rows.setdefault((request.adapter, request.head), []).append(row)
        else:
            pooled.append(row)
    if pooled:
        _add_states(packed.hidden, pooled)
    heads = {key: pool.head(*key) for key in rows}
    read = {key: [_read_now(row) for row in members] for key, members in rows.items()}
    for key, together in _logits(packed, heads, read).items() if rows else ():
        head = heads[key]
        parts = together.float().cpu().split([len(r.rows) for r in read[key]])
        for row, now, part in zip(rows[key], read[key], parts, strict=True):
            _keep(row.state, now, part, head)
    answers: dict[str, HeadAnswer] = {}
    errors: dict[str, ErrorValue] = {}
    for row in filter(lambda row: row.answers, packed.head_rows):
        request, found = row.state.request, row.state.head_logits
        assert found is not None
        if not torch.isfinite(found).all():
            what = "the model" if request.head is None else f"head {request.head!r}"
            error = StepFailed(f"{what} returned values that are not finite for this input")
            errors[request.request_id] = ErrorValue.of(error)
        elif request.adapter is not None and request.head is not None:
            answers[request.request_id] = _answer(row.state, heads[request.adapter, request.head], config)
        else:
            own: dict[str, Any] = {"task": "embedding", "label": "", "confidence": 1.0, "labels": ()}
            answers[request.request_id] = HeadAnswer(**own, values=tuple(F.normalize(found[0], dim=0).tolist()))
    return answers, errors


_Key = tuple[str, str]  # adapter and head


def _logits(
    packed: ForwardBatch,
    heads: Mapping[_Key, TaskHead],
    read: Mapping[_Key, Sequence[_ReadNow]],
) -> dict[_Key, torch.Tensor]:
    """The logits of all rows of each head, over hidden states or over the language model's inputs."""
    hidden = packed.hidden
    rows = {key: torch.from_numpy(np.concatenate([r.rows for r in read[key]])).to(hidden.device) for key in heads}
    of_states = [key for key, head in heads.items() if head.spec.reads == "states"]
    found = atmm.head_logits(
        hidden, [atmm.HeadRows(heads[key].weight, heads[key].bias, rows[key]) for key in of_states]
    )
    of_inputs = {
        key: heads[key].logits(packed.inputs.index_select(0, rows[key])) for key in heads if key not in of_states
    }
    return dict(zip(of_states, found, strict=True)) | of_inputs


def _add_states(hidden: torch.Tensor, rows: Sequence[Row]) -> None:
    """Add the states that embeddings read in this step. After a preemption, a sum starts again with its first token."""
    spans = [row.read() for row in rows]  # each is contiguous
    sums = torch.stack([hidden[span[0] : span[-1] + 1].float().sum(0) for span in spans]).cpu()
    for row, found in zip(rows, sums, strict=True):
        before = row.state.head_logits
        starts = before is None or row.first <= row.state.head_tokens[0]
        row.state.head_logits = found[None] if starts else before + found


class _ReadNow(NamedTuple):
    """The rows that a head reads in this step.

    rows: rows of the hidden states, int64. first: number of the request's tokens that were read in earlier steps.
    total: number of tokens that its head reads in all.
    """

    rows: np.ndarray
    first: int
    total: int


def _read_now(row: Row) -> _ReadNow:
    """The rows that a head reads in one request's share of the step."""
    wanted = row.state.head_tokens
    first, stop = np.searchsorted(wanted, (row.first, row.last))
    return _ReadNow(wanted[first:stop] - row.first + row.start, int(first), len(wanted))


def _keep(state: RequestState, now: _ReadNow, logits: torch.Tensor, head: TaskHead) -> None:
    """Store logits by token. Tokens that are recomputed after a preemption overwrite them with the same values."""
    if state.head_logits is None:
        state.head_logits = logits.new_full((now.total, head.task.num_outputs), torch.nan)
    state.head_logits[now.first : now.first + len(logits)] = logits


def _answer(state: RequestState, head: TaskHead, config: Any) -> HeadAnswer:
    assert state.head_logits is not None
    task = head.task
    if task.reads_images:
        answer: Answer = task.decode(state.head_logits, image_grids(config, state.visuals_in_order()))
    else:
        answer = task.decode(state.head_logits[0])
    return HeadAnswer(
        task=task.kind,
        label=answer.label,
        confidence=answer.confidence,
        labels=task.labels,
        scores=answer.scores,
        label_id=answer.label_id,
        count=answer.count,
        chosen=answer.chosen,
        values=answer.values,
        deviations=answer.deviations,
        boxes=tuple(
            FoundBox(
                label=task.labels[box.label],
                label_id=box.label,
                score=box.score,
                left=box.left,
                top=box.top,
                right=box.right,
                bottom=box.bottom,
                image=box.image,
            )
            for box in answer.boxes
        ),
    )
