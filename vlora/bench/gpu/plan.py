"""The stages in order of value, with the time that each is expected to take on an H100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlora.errors import BadConfig


class Stage(NamedTuple):
    """One stage."""

    number: int  # place in the order, from 0
    name: str  # its name in `--stages`, and of its module in `vlora.bench.gpu.stages` or in `benchmarks.gpu`
    needs_s: float  # a stage starts only if the box has this much time left; an estimate for an H100
    limit_s: float  # the process is ended after this time
    shows: str  # its subject, for the documentation and `--help`

    @property
    def file_name(self) -> str:
        return f"{self.number:02d}-{self.name}.json"


STAGES: Sequence[Stage] = tuple(
    Stage(number, *fields)
    for number, fields in enumerate(
        (
            ("facts", 30, 90, "versions, missing packages, copy speed, a large product, the cost of a launch"),
            ("smoke", 50, 120, "tiny models in three modes and each Triton kernel, against the CPU"),
            ("oracle", 120, 240, "the oracle tests, against transformers + PEFT and float64"),
            ("attention", 40, 120, "attention over pages: error, and time against torch's"),
            ("merge", 45, 120, "switching a 7B model's weights: time against a copy; drift in place"),
            (
                "step",
                180,
                330,
                "decode steps of a 7B model in every mode, graph and eager, also in fp8, against bytes / bandwidth",
            ),
            ("search", 150, 300, "the operator's strategy table for a 7B model's layers"),
            ("styles", 90, 240, "the operator against the tilings of Punica, S-LoRA, vLLM and SGLang"),
            ("prefill", 60, 180, "prompts of 2,048 tokens in every mode; images through a 7B model's vision tower"),
            ("serve", 120, 300, "64 requests over 32 adapters, against transformers + PEFT"),
            ("costs", 120, 300, "the cost of a step, in the format of `vlora simulate --costs`"),
            ("profile", 45, 120, "the kernels of a decode step and of a prefill step"),
        )
    )
)

INSTALLED = {"facts", "smoke", "oracle", "search", "costs"}
"""Stages in `vlora.bench.gpu.stages`; the others are in `benchmarks.gpu` of a checkout."""

SMALL_NEEDS_S = 5.0
"""Of every stage on a CPU, where all shapes are small."""


def chosen(names: Sequence[str]) -> list[Stage]:
    """The stages with these names in the order of value."""
    known = {stage.name: stage for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadConfig(f"no stage named {unknown[0]!r}; choose among {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]
