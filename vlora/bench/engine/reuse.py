"""The cost of ten questions about one picture, with and without the prefix cache, in units of one prefill.

The floor is tokens: the prefix before the questions once, then each question and the block in which it begins. All
engines encode a picture once for all of its questions, so only the language model's part differs. In sequence, each
question is a separate step that reads all weights for its few tokens: the report includes this case without a goal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vlora.bench.dummy import half_billion_config
from vlora.bench.report import Goal, Report
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.models.processing import vision_input
from vlora.types import Request, SamplingParams, VisionInput

_NUM_QUESTIONS = 10
_QUESTION = 32  # tokens
_SIDE = 64  # patches per side of a picture; four patches make a token
_AT_ONCE, _IN_TURN, _WITHOUT = "ten at once", "ten in turn", "ten at once, no cache"


def run(quick: bool) -> Report:
    """Questions about pictures of 1,024 tokens to a 0.5 B-parameter model in bfloat16, one thread, CPU time.

    quick: the model's first eight layers, one round.
    """
    torch.set_num_threads(1)
    config = half_billion_config(8 if quick else 24)
    cached, plain = (_QuestionEngine(config, prefix_cache) for prefix_cache in (True, False))
    calls: dict[str, Callable[[], object]] = {
        "one": lambda: plain.ask(1),
        _AT_ONCE: lambda: cached.ask(_NUM_QUESTIONS),
        _IN_TURN: lambda: cached.ask(_NUM_QUESTIONS, in_turn=True),
        _WITHOUT: lambda: plain.ask(_NUM_QUESTIONS),
    }
    seconds = interleaved(calls, 1 if quick else 3, warmup=1)
    rows: list[dict[str, Any]] = []
    for what, spent in seconds.items():
        engine, num_questions = plain if what in ("one", _WITHOUT) else cached, 1 if what == "one" else _NUM_QUESTIONS
        rows.append(
            {
                "what": what,
                "prompt tokens": num_questions * engine.prompt_len,
                "computed tokens": engine.computed[num_questions, what == _IN_TURN],
                "ms": median_ms(spent),
                "worst ms": max(spent) * 1e3,
                "/ one": median_ratio(spent, seconds["one"]),
            }
        )
    goals = [Goal(f"{row['what']} / one", row["/ one"], 1.5, True) for row in rows if row["what"] == _AT_ONCE]
    return Report("reuse", rows, goals)


class _QuestionEngine:
    """An engine that gets questions about a new picture each time."""

    def __init__(self, config: Any, prefix_cache: bool) -> None:
        settings = EngineConfig(
            model="dummy", arena_bytes=2**29, max_batch_size=16, max_step_tokens=512, prefix_cache=prefix_cache
        )
        self._local = LocalEngine(settings, model=dummy_model(config, "bfloat16", torch.device("cpu"), seed=0))
        self._draws = torch.Generator().manual_seed(0)
        patch = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
        fields = {
            "pixel_values": torch.randn(_SIDE**2, patch, generator=self._draws),
            "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]]),
        }
        picture = vision_input("image", fields, _SIDE**2 // 4)
        # Speed does not depend on the pixels; the hash distinguishes pictures.
        self._pictures = (msgspec.structs.replace(picture, content_hash=f"picture {n}") for n in itertools.count())
        shown = [config.image_token_id] * picture.num_tokens
        self._before = (*self._words(8), config.vision_start_token_id, *shown, config.vision_end_token_id)
        self.prompt_len = len(self._before) + _QUESTION
        self.computed: dict[tuple[int, bool], int] = {}  # tokens, by number of questions and whether in sequence

    def ask(self, num_questions: int, *, in_turn: bool = False) -> None:
        """Answer with one token each; `in_turn`: one question after another, instead of all at once."""
        before = self._local.engine.stats().num_computed_tokens
        picture = next(self._pictures)
        requests = [self._request(f"question {n}", picture) for n in range(num_questions)]
        for together in ([request] for request in requests) if in_turn else [requests]:
            outputs = self._local.run(together)
            assert all(parts[-1].finish_reason == "length" for parts in outputs.values()), "a question has no answer"
        self.computed[num_questions, in_turn] = self._local.engine.stats().num_computed_tokens - before

    def _request(self, name: str, picture: VisionInput) -> Request:
        return Request(
            request_id=name,
            prompt_ids=(*self._before, *self._words(_QUESTION)),
            vision=(picture,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        )

    def _words(self, count: int) -> list[int]:
        return torch.randint(3, 1000, (count,), generator=self._draws).tolist()
