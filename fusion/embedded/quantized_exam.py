"""The accuracy that quantized weights lose: one engine with them and one without answer the exam's questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fusion.embedded import world
from fusion.embedded.evaluate import MAX_NEW_TOKENS, exam_scenes
from fusion.embedded.exam import Gate
from vlora.config import EngineConfig, Quantize
from vlora.engine import LocalEngine
from vlora.models import InputProcessor
from vlora.types import Request, SamplingParams

_BATCH = 64  # questions
_LOST_GOAL = 0.5  # percentage points, in eight bits


class LostRow(NamedTuple):
    """Answers to the questions of one skill: shares that match word for word, from 0 to 1.

    Attributes:
        skill: Of the questions.
        right: Without quantization.
        quantized: With it.
        lost_points: The difference in percentage points.
        same: Share of questions with the same answer in both.
        num_questions: Their number.
    """

    skill: str
    right: float
    quantized: float
    lost_points: float
    same: float
    num_questions: int


def compare(
    checkpoint: str,
    quantize: Quantize,
    *,
    quantize_head: bool,
    seeds: Sequence[int],
    num_scenes: int,
    say: Callable[[str], None],
) -> tuple[list[LostRow], list[Gate]]:
    """Compare answers per skill and overall.

    Args:
        checkpoint: A folder with a model and a processor.
        num_scenes: Pictures per seed; a quarter as many clips are added.
    """
    asked = [pair for seed in seeds for pair in _questions(seed, num_scenes)]
    say(f"{len(asked)} questions without quantization")
    plain = answers_of(EngineConfig(model=checkpoint), asked)
    say(f"{len(asked)} questions in {quantize}")
    quantized = answers_of(EngineConfig(model=checkpoint, quantize=quantize, quantize_head=quantize_head), asked)
    skills: dict[str, list[tuple[bool, bool, bool]]] = defaultdict(list)
    for (_, question), before, after in zip(asked, plain, quantized, strict=True):
        found = (before == question.answer, after == question.answer, before == after)
        skills[question.skill].append(found)
        skills["overall"].append(found)
    overall = skills.pop("overall")
    rows = [_row(skill, found) for skill, found in (*sorted(skills.items()), ("overall", overall))]
    goal = [Gate(f"points lost in {quantize}", rows[-1].lost_points, _LOST_GOAL, at_most=True)]
    return rows, goal if quantize in ("int8", "fp8") else []


def _row(skill: str, found: Sequence[tuple[bool, bool, bool]]) -> LostRow:
    right, quantized, same = (float(np.mean(column)) for column in zip(*found, strict=True))
    return LostRow(skill, right, quantized, 100 * (right - quantized), same, len(found))


def _questions(seed: int, num_scenes: int) -> Iterator[tuple[list[Image.Image], world.Question]]:
    """The questions of `evaluate.accuracy_by_skill`, with their pictures."""
    for scene in exam_scenes(seed, num_scenes):
        pictures = [Image.fromarray(frame) for frame in scene.frames]
        yield from ((pictures, question) for question in scene.questions)


def answers_of(config: EngineConfig, asked: Sequence[tuple[list[Image.Image], world.Question]]) -> list[str]:
    """An engine's greedy answers to questions about pictures."""
    engine, processor = LocalEngine(config), InputProcessor.from_pretrained(config.model)
    words: list[str] = []
    for first in range(0, len(asked), _BATCH):
        requests = []
        for number, (pictures, question) in enumerate(asked[first : first + _BATCH]):
            encoded = processor.encode(processor.chat(question.text, len(pictures)), pictures)
            sampling = SamplingParams(max_tokens=MAX_NEW_TOKENS)
            request = Request(
                request_id=str(number), prompt_ids=encoded.prompt_ids, vision=encoded.vision, sampling=sampling
            )
            requests.append(request)
        for outputs in engine.run(requests).values():
            words.append(processor.decode([token for output in outputs for token in output.token_ids]))
    return words
