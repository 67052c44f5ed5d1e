"""The cost of ten questions about one picture, to one model or to ten adapters, in units of one question.

The floor is tokens: the prefix before the questions once, then each question and the block in which it begins. All
engines encode a picture once for all of its questions, so only the language model's part differs.

Each of ten adapters asks its own question about one picture. Ordinary ones have KV of their own for the whole prompt.
Activated ones (aLoRA) share the KV of the 960 tokens before their invocation, of 1,024.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import dummy_picture, half_billion_config, language_shapes, unseen, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model

_NUM_QUESTIONS = 10
_QUESTION = 32  # tokens
_SIDE = 64  # patches per side of a picture; four patches make a token
_AT_ONCE, _WITHOUT = "ten at once", "ten at once, no cache"
_RANK = 16
_INVOCATION = (1001, 1002, 1003)
_OWN = 64  # tokens from the invocation on
_ADAPTERS_SIDE, _ADAPTERS_BEFORE = 60, 58  # 900 picture tokens and 60 others before the invocation
_ONE_ADAPTER, _ACTIVATED, _ORDINARY = "one activated adapter", "ten activated adapters", "ten ordinary adapters"


def measure(quick: bool) -> Measured:
    """Questions about pictures of 1,024 tokens to a 0.5 B-parameter model in bfloat16, one thread, CPU time; quick: the
    model's first eight layers, one round.
    """
    torch.set_num_threads(1)
    config = half_billion_config(8 if quick else 24)
    cached, plain = (_QuestionEngine(config, prefix_cache) for prefix_cache in (True, False))
    rounds = 1 if quick else 3
    rows = _timed(
        {
            "one": lambda: plain.ask(1),
            _AT_ONCE: lambda: cached.ask(_NUM_QUESTIONS),
            _WITHOUT: lambda: plain.ask(_NUM_QUESTIONS),
        },
        rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        activated, ordinary = (_adapter_engine(config, Path(folder) / kind, kind) for kind in ("activated", "ordinary"))
        rows += _timed(
            {
                _ONE_ADAPTER: lambda: activated.ask(1),
                _ACTIVATED: lambda: activated.ask(_NUM_QUESTIONS),
                _ORDINARY: lambda: ordinary.ask(_NUM_QUESTIONS),
            },
            rounds,
        )
    bounds = {_AT_ONCE: 1.5, _ACTIVATED: 1.6}
    ratios = {row["what"]: row["/ one"] for row in rows}
    return Measured(rows, goals=[Goal(f"{what} / one", ratios[what], bound, True) for what, bound in bounds.items()])


BENCH = Bench(name="reuse", measure=measure)


def _timed(calls: dict[str, Callable[[], _Asked]], rounds: int) -> list[dict[str, Any]]:
    """A row for each call, relative to the first one."""
    asked: dict[str, _Asked] = {}

    def recording(what: str) -> Callable[[], object]:
        return lambda: asked.__setitem__(what, calls[what]())

    seconds = interleaved({what: recording(what) for what in calls}, rounds, warmup=1)
    first = next(iter(calls))
    return [
        {
            "what": what,
            "prompt tokens": asked[what].prompt_tokens,
            "computed tokens": asked[what].computed_tokens,
            "pictures encoded": asked[what].encoded,
            "ms": median_ms(spent),
            "worst ms": max(spent) * 1e3,
            "/ one": median_ratio(spent, seconds[first]),
        }
        for what, spent in seconds.items()
    ]


class _Asked(NamedTuple):
    prompt_tokens: int
    computed_tokens: int
    encoded: int


def _adapter_engine(config: Any, folder: Path, kind: str) -> _QuestionEngine:
    """An engine with ten adapters, each of which is asked one question."""
    shapes = language_shapes(dummy_model(config, "bfloat16", torch.device("meta"), seed=0))
    invocation = _INVOCATION if kind == "activated" else ()
    adapters = {
        f"{kind}{number}": write_adapter(folder / f"{number}", shapes, _RANK, number, invocation=invocation)
        for number in range(_NUM_QUESTIONS)
    }
    return _QuestionEngine(config, True, adapters, _INVOCATION, _ADAPTERS_SIDE, _ADAPTERS_BEFORE, _OWN)


class _QuestionEngine:
    """An engine that gets questions about a new picture each time."""

    def __init__(
        self,
        config: Any,
        prefix_cache: bool,
        adapters: Mapping[str, str] = MappingProxyType({}),
        begin: Sequence[int] = (),
        side: int = _SIDE,
        num_before: int = 8,
        question: int = _QUESTION,
    ) -> None:
        settings = EngineConfig(
            model="dummy", arena_bytes=2**30, max_batch_size=16, max_step_tokens=512, prefix_cache=prefix_cache
        )
        self._engine = TimedEngine(settings, dummy_model(config, "bfloat16", torch.device("cpu"), seed=0), adapters)
        self._adapters: Sequence[str | None] = list(adapters) or [None] * _NUM_QUESTIONS
        self._begin, self._num_words = tuple(begin), question - len(begin)
        self._draws = random.Random(0)
        self._picture = dummy_picture(config, side)
        shown = [config.image_token_id] * self._picture.num_tokens
        self._before = (*self._words(num_before), config.vision_start_token_id, *shown, config.vision_end_token_id)
        self._prompt_len = len(self._before) + question

    def ask(self, num_questions: int) -> _Asked:
        """Answer all at once, with one token each."""
        before, picture = self._engine.engine.stats(), unseen(self._picture)
        for adapter in self._adapters[:num_questions]:
            words = (*self._before, *self._begin, *self._words(self._num_words))
            self._engine.add(words, 1, adapter, vision=(picture,))
        self._engine.finish()
        after = self._engine.engine.stats()
        return _Asked(
            num_questions * self._prompt_len,
            after.num_computed_tokens - before.num_computed_tokens,
            after.num_vision_encoded - before.num_vision_encoded,
        )

    def _words(self, count: int) -> list[int]:
        return self._draws.choices(range(3, 1000), k=count)
