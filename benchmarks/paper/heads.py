"""The latency of a task head beside an answer in words to the same prompt: V-LoRA's figure 16.

The saving depends on three settings. The answer length: text of n tokens takes n - 1 steps more than a head; the
paper's action recognition takes 5, and the median over this project's own domain of actions is measured next to it. The
tokens per frame: 64, as Qwen2-VL encodes 224 x 224 pixels. The prompt: the same for both, although a prompt for text
might have to list the choices. Every request encodes its own frames: no embeddings are cached or shared. Two towers:
one of ViT-B's width and depth (98 million parameters), and Qwen2-VL's (665 million). Floors of the ratio are in record
0028.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.paper.measuring import Measuring
from fusion.embedded import checkpoint_path
from fusion.synthetic.road_signs import ACTIONS
from vlora.bench.dummy import dummy_picture, half_billion_config, real_tower_config, unseen
from vlora.bench.report import Row
from vlora.bench.timed_engine import HEAD, TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.models.loading import dummy_model
from vlora.models.processing import InputProcessor

_SIDE = 16  # patches per side of a frame; four patches make a token
_QUESTION = 16  # tokens
_PAPER_ANSWER = 5  # tokens; figure 11's head saves 4 rounds
_ADAPTER = "actions"

Ask = Callable[[int, int, int], None]
"""Runs a number of concurrent requests of so many frames to completion; 0 answer tokens query the head."""


def latency(measuring: Measuring, limit_s: float) -> list[Row]:
    """Milliseconds of a head and of text, by tower, batch, frames and length of the text.

    Shapes larger than one whose round takes more than `limit_s` are left out. `answer`: the shorter or the longer one.
    """
    quick = measuring.setting.quick
    small, large = ([(1, 1), (8, 1)], [(1, 1)]) if quick else (itertools.product((1, 8), (1, 4, 6)), [(1, 1), (8, 1)])
    rows: list[Row] = []
    for tower, config_of, shapes in (("ViT-B", half_billion_config, small), ("Qwen2-VL", real_tower_config, large)):
        rows += measure_tower(tower, asking(config_of(8 if quick else 24)), shapes, 1 if quick else 5, limit_s)
    longest = max(row["answer tokens"] for row in rows)
    return [{**row, "answer": "longer" if row["answer tokens"] == longest else "shorter"} for row in rows]


def measure_tower(tower: str, ask: Ask, shapes: Iterable[tuple[int, int]], rounds: int, limit_s: float) -> list[Row]:
    answers = (median_answer_tokens(), _PAPER_ANSWER)
    rows: list[Row] = []
    for place, (batch, frames) in enumerate(shapes):
        calls = {str(tokens): functools.partial(ask, batch, frames, tokens) for tokens in (0, *answers)}
        # The first shape is the smallest: the others need no warm-up, which would take as long as a round.
        seconds = interleaved(calls, rounds, warmup=int(place == 0), limit_s=limit_s)
        for tokens in answers:
            head, words = seconds["0"], seconds[str(tokens)]
            ratio = median_ratio(head, words)
            about = {"tower": tower, "batch": batch, "frames": frames, "answer tokens": tokens}
            times = {"head ms": median_ms(head), "words ms": median_ms(words)}
            rows.append({**about, **times, "ratio": ratio, "less %": 100 * (1 - ratio), "rounds": len(words)})
        if sum(map(statistics.median, seconds.values())) > limit_s:
            break
    return rows


def median_answer_tokens() -> int:
    """Median over the built-in domain of actions: the tokens of its labels in the embedded model, with the end token;
    of two middle values the shorter, which favours text.
    """
    tokenizer = InputProcessor.from_pretrained(checkpoint_path()).tokenizer
    ids = tokenizer(list(ACTIONS), add_special_tokens=False)["input_ids"]
    return statistics.median_low(len(own) + 1 for own in ids)


def asking(model_config: Any) -> Ask:
    """Questions to one engine, each about frames that no cache has seen."""
    model = dummy_model(model_config, "bfloat16", torch.device("cpu"), seed=0)
    settings: dict[str, Any] = {"max_batch_size": 8, "max_step_tokens": 4096, "arena_bytes": 2 * 2**30}
    engine = TimedEngine(model, {_ADAPTER: 16}, heads=True, **settings)
    picture = dummy_picture(model_config, _SIDE)

    def ask(batch: int, frames: int, answer_tokens: int) -> None:
        for _ in range(batch):
            shown, head = [unseen(picture) for _ in range(frames)], None if answer_tokens else HEAD
            engine.add(_QUESTION, max(1, answer_tokens), _ADAPTER, shown, head=head)
        engine.finish()

    return ask
