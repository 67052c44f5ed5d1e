"""Savings of a task head: one pass over a prompt against generated text for the same prompt.

V-LoRA section 4.2.2 and figure 19: 41 to 63 % less latency. The saving depends on three settings, which the report
states. The answer length: text of n tokens takes n - 1 steps more than a head; the paper's action recognition takes 5,
and the median over this project's own domain of actions is reported next to it. The tokens per frame: 64, as Qwen2-VL
encodes 224 x 224 pixels. The prompt: the same for both, although a prompt for text might have to list the choices.
Every request encodes frames of its own with the model's vision tower: no embeddings are cached or shared. Two towers:
one of ViT-B's width and depth (98 million parameters), and Qwen2-VL's (665 million), which all its sizes have.

A head cannot cost less than the tower and the prompt, which text needs too. The floor of the ratio is P / (P + D): P is
the time of their matrix products alone, with the model's own weights, each read once as in a pass, in the type that the
CPU multiplies fastest, and D is the time of the text's decoding. Neither depends on the head. D of one request is timed
within its calls. Requests of a batch also decode in the steps that encode others' frames; their D is what the text
takes longer than one of one token, with the noise of whole calls. A measured ratio may be below its floor by the noise
of whole calls, of which decoding may be a hundredth. A goal below the floor cannot be met by any head; there the head
may take `_OVER_FLOOR` of it, and no more than the text but for the noise of a comparison: where four decoding steps
take a hundredth of the prompt, the two are equal.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fusion.embedded import checkpoint_path
from fusion.synthetic.road_signs import ACTIONS
from vlora.bench.dummy import (
    dummy_picture,
    half_billion_config,
    language_shapes,
    real_tower_config,
    unseen,
    write_adapter,
    write_head,
)
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.step import product_dtype
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import dummy_model
from vlora.types import RequestOutput

_SIDE = 16  # patches per side of a frame; four patches make a token
_QUESTION = 16  # tokens
_PAPER_ANSWER = 5  # tokens; figure 11's head saves 4 rounds
_ADAPTER = "actions"
_GOALS = {1: 0.59, 8: 0.8}

"""By batch size: the paper's smallest saving, and what is left of it where decoding steps share their weights."""
_LIMIT_S = 180  # of each tower and shape: eight requests of four frames take a minute a call where products are slow
_OVER_FLOOR = 1.15  # attention, norms, activations, and preparation of the pixels
_NOISE = 1.05  # of the ratio of two calls of up to a minute each, on a shared machine


def measure(quick: bool) -> Measured:
    """Latency of a 0.5 B-parameter model in bfloat16, one thread, CPU time. quick: the model's first eight layers,
    fewer shapes and rounds.
    """
    torch.set_num_threads(1)
    answers = {"own domain of actions, median": median_answer_tokens(), "paper, figure 11": _PAPER_ANSWER}
    return Measured(latency_rows(quick, _LIMIT_S, with_floor=True), {"answer_tokens": answers})


def goals(measured: Measured) -> list[Goal]:
    return [
        Goal(
            f"head / words of 5 tokens, {row['tower']}, batch {row['batch']}, {row['frames']} frames (floor "
            f"{row['floor']:.2f})",
            row["ratio"],
            goal_of(row["batch"], row["floor"]),
            True,
        )
        for row in measured.rows
        if row["answer tokens"] == _PAPER_ANSWER
    ]


BENCH = Bench(name="heads", measure=measure, goals=goals)


def goal_of(batch: int, floor: float) -> float:
    """The largest ratio of a head to words, given its floor."""
    goal = _GOALS[batch]
    return goal if floor < goal else min(_NOISE, _OVER_FLOOR * floor)


def floor_of(products: Sequence[float], decoding: Sequence[float]) -> float:
    """The least ratio of a head to words: P / (P + D) of the module's docstring, from seconds of several rounds."""
    products_s = statistics.median(products)
    return products_s / (products_s + max(0.0, statistics.median(decoding)))


def latency_rows(quick: bool, limit_s: float, *, with_floor: bool) -> list[dict[str, Any]]:
    """Milliseconds of a head and of text, by tower, batch, frames and length of the text; torch has one thread. Shapes
    larger than one whose round takes more than `limit_s` are left out; rows `with_floor` need copies of all weights.
    """
    num_layers = 8 if quick else 24
    small, large = ([(1, 1), (8, 1)], [(1, 1)]) if quick else (itertools.product(_GOALS, (1, 4, 6)), [(1, 1), (8, 1)])
    towers = {"ViT-B": (half_billion_config, small), "Qwen2-VL": (real_tower_config, large)}
    rows: list[dict[str, Any]] = []
    for tower, (config_of, shapes) in towers.items():
        engine = HeadEngine(config_of(num_layers), with_products=with_floor)
        rows += measure_tower(tower, engine, shapes, 1 if quick else 5, limit_s)
        del engine  # before the next one is built
    return rows


def measure_tower(
    tower: str, engine: HeadEngine, shapes: Iterable[tuple[int, int]], rounds: int, limit_s: float
) -> list[dict[str, Any]]:
    """The rows of one tower."""
    own_answer = median_answer_tokens()
    rows: list[dict[str, Any]] = []
    for place, (batch, frames) in enumerate(shapes):
        decoding: dict[int, list[float]] = {own_answer: [], _PAPER_ANSWER: []}
        ask = functools.partial(engine.ask, batch, frames)
        calls: dict[str, Callable[[], object]] = {"head": functools.partial(ask, 0)}
        for tokens, decode_s in decoding.items():
            calls[f"{tokens} tokens"] = functools.partial(_answer, ask, tokens, decode_s)
        if engine.has_products:
            calls["products"] = functools.partial(_multiply, engine.factors(batch, frames))
            if batch > 1:
                calls["1 token"] = functools.partial(ask, 1)
        # The first shape is the smallest: the others need no warm-up, which would take as long as a round.
        seconds = interleaved(calls, rounds, warmup=int(place == 0), limit_s=limit_s)
        for tokens, within in decoding.items():
            words = seconds[f"{tokens} tokens"]
            decode_s = _decoding(words, within, seconds.get("1 token"))
            ratio = median_ratio(seconds["head"], words)
            floor = floor_of(seconds["products"], decode_s) if engine.has_products else None
            rows.append(
                {
                    "tower": tower,
                    "batch": batch,
                    "frames": frames,
                    "prompt tokens": engine.prompt_len(frames),
                    "answer tokens": tokens,
                    "head ms": median_ms(seconds["head"]),
                    "words ms": median_ms(words),
                    "decoding ms": None if floor is None else median_ms(decode_s),
                    "ratio": ratio,
                    "floor": floor,
                    "less %": 100 * (1 - ratio),
                    "rounds": len(words),
                }
            )
        if sum(map(statistics.median, seconds.values())) > limit_s:
            break
    return rows


def _answer(ask: Callable[[int], float], tokens: int, decode_s: list[float]) -> None:
    decode_s.append(ask(tokens))


def _decoding(words: list[float], within: list[float], of_one: list[float] | None) -> list[float]:
    """Seconds of decoding in each round that counts: what words take longer than answers `of_one` token, if given, else
    those `within` the calls, of which warm-up rounds come first.
    """
    if of_one is None:
        return within[-len(words) :]
    return [more - one for more, one in zip(words, of_one, strict=True)]


def median_answer_tokens() -> int:
    """Median over the built-in domain of actions: the tokens of its labels in the embedded model, with the end token;
    of two middle values the shorter, which favours text.
    """
    tokenizer = InputProcessor.from_pretrained(checkpoint_path()).tokenizer
    ids = tokenizer(list(ACTIONS), add_special_tokens=False)["input_ids"]
    return statistics.median_low(len(own) + 1 for own in ids)


class HeadEngine:
    """An engine with one adapter that has a head of ten actions.

    Attributes:
        has_products: Whether `factors` has copies of the model's weights.
    """

    def __init__(self, model_config: Any, *, with_products: bool) -> None:
        model = dummy_model(model_config, "bfloat16", torch.device("cpu"), seed=0)
        self.has_products = with_products
        self._weights = _weights(model, model_config.text_config.num_hidden_layers - 1) if with_products else []
        self._image_id: int = model_config.image_token_id
        settings = EngineConfig(
            model="dummy",
            max_batch_size=8,
            max_step_tokens=4096,
            arena_bytes=2 * 2**30,
            merge_fidelity_floor=0.0,
            prefix_cache=False,  # every request computes its prompt
            vision_cache_bytes=0,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = write_adapter(Path(folder) / _ADAPTER, language_shapes(model), rank=16, seed=0)
            labels = [f"action {i}" for i in range(10)]
            write_head(path, "head", model_config.text_config.hidden_size, labels, "action", "what happens ?")
            self._engine = TimedEngine(settings, model, {_ADAPTER: path})
        self._frames = [unseen(dummy_picture(model_config, _SIDE)) for _ in range(6 * max(_GOALS))]
        self._words = random.Random(1).choices(range(3, 1000), k=_QUESTION)

    def prompt_len(self, frames: int) -> int:
        return len(self._prompt(frames))

    def ask(self, batch: int, frames: int, answer_tokens: int) -> float:
        """Run `batch` concurrent requests to completion; 0 answer tokens query the head. Returns CPU seconds of the
        steps after the one with the first tokens.
        """
        ids = [
            self._engine.add(
                self._prompt(frames),
                max(1, answer_tokens),
                _ADAPTER,
                vision=tuple(self._frames[place * frames : (place + 1) * frames]),
                head=None if answer_tokens else "head",
            )
            for place in range(batch)
        ]
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        decode_s = 0.0
        while self._engine.has_work:
            decoding, started = all(outputs.values()), time.process_time()
            for output in self._engine.step():
                outputs[output.request_id].append(output)
            decode_s += decoding * (time.process_time() - started)
        for each in outputs.values():
            assert sum(len(output.token_ids) for output in each) == answer_tokens
            assert (each[-1].head is not None) == (answer_tokens == 0)
        return decode_s

    def factors(self, batch: int, frames: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and weights of the matrix products of tower and language model's layers for `batch` prompts."""
        _input.cache_clear()  # those of another shape take gigabytes
        tokens = {"language": batch * self.prompt_len(frames), "tower": batch * frames * _SIDE**2}
        tokens["merger"] = tokens["tower"] // 4
        return [(_input(tokens[part], weight.shape[1]), weight) for part, weight in self._weights]

    def _prompt(self, frames: int) -> tuple[int, ...]:
        placeholders = [self._image_id] * (_SIDE * _SIDE // 4)
        ids = [token for _ in range(frames) for token in (self._image_id - 3, *placeholders, self._image_id - 2)]
        return (*ids, *self._words)


def _multiply(factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, weight in factors:
        F.linear(x, weight)


@functools.cache
def _input(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=product_dtype())


def _weights(model: torch.nn.Module, last_layer: int) -> list[tuple[str, torch.Tensor]]:
    """The part and weight of each linear layer of tower and language model, without the output head and the layers of
    the last layer that compute only the tokens that are read."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, layer in model.named_modules():
        computes_few = f".layers.{last_layer}." in name and not name.endswith(("k_proj", "v_proj"))
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head") and not computes_few:
            part = "language" if "language_model" in name else "merger" if "merger" in name else "tower"
            found.append((part, layer.weight.detach().to(product_dtype())))
    return found
