"""Reference answers of transformers and PEFT for one model family, shared by the oracle tests of several rooms.

The session fixtures `references`, `case_references` and `adapter_folders` (`tests/conftest.py`) build one of each kind
and family, so that test modules do not repeat it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.families import Prompt, build_model, make_prompt
from tests.oracle import Oracle

NUM_TOKENS = 16
"""Answer tokens of a `CaseReference`."""

TOLERANCE = 1e-4
"""Largest difference of two logits that counts as rounding in float32."""

Answer = tuple[list[int], torch.Tensor]
"""Tokens, and the logits from which they were chosen [tokens, vocab]."""

# One prompt per adapter (None: the base model), most with images, some with several; texts of different lengths.
CASES: Sequence[tuple[str | None, int]] = (
    ("everywhere64", 1),
    (None, 0),
    ("wide8", 1),
    ("narrow4", 2),
    ("patterned16", 0),
    (None, 1),
    ("wide8", 0),
    ("everywhere64", 2),
)


def assert_same(got: Answer, want: Answer) -> None:
    assert got[0] == want[0]
    assert float((got[1] - want[1]).abs().max()) < TOLERANCE


class Reference:
    """A family's model, its adapters on disk, and reference answers computed on demand, once each."""

    def __init__(self, family: str, folder: Path, num_tokens: int = 12) -> None:
        """num_tokens: length of the reference answers."""
        self.family = family
        self.model = build_model(family)
        self.oracle = Oracle(family, self.model)
        self.adapters = self.oracle.save(folder)
        self._num_tokens = num_tokens
        self._answers: dict[Any, Answer] = {}

    def picture(self, seed: int, num_images: int = 1) -> Prompt:
        """Images, each after some text; the same seed gives the same beginning for any number of images."""
        return make_prompt(self.family, self.model, seed, num_images=num_images, text=(5, 0))

    def expect(self, got: Answer, adapter: str | None, prompt: Prompt) -> None:
        """Assert that an engine's answer is the reference answer."""
        key = (adapter, prompt.prompt_ids, tuple(item.content_hash for item in prompt.vision))
        if key not in self._answers:
            self._answers[key] = self.oracle.generate(prompt, adapter, self._num_tokens)
        assert_same(got, self._answers[key])


def prompts_of(family: str, model: Any, cases: Sequence[tuple[str | None, int]]) -> list[tuple[str | None, Prompt]]:
    """A prompt for each pair of an adapter and a number of images."""
    return [
        (adapter, make_prompt(family, model, seed, num_images=images, text=(5 + 3 * seed, 4 + 2 * seed)))
        for seed, (adapter, images) in enumerate(cases)
    ]


@dataclasses.dataclass
class CaseReference:
    """A family's adapters on disk, fixed cases, and the reference answer of each."""

    family: str
    adapters: dict[str, str]
    cases: list[tuple[str | None, Prompt]]
    answers: list[Answer]

    @classmethod
    def of(cls, family: str, folder: Path) -> CaseReference:
        """Adapter folders are written into `folder`."""
        model = build_model(family)
        oracle = Oracle(family, model)
        cases = prompts_of(family, model, CASES)
        answers = [oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
        return cls(family, oracle.save(folder), cases, answers)
