"""The engine's oracle tests on the simulated device, with threads: every mismatch of devices fails them."""

from __future__ import annotations

import pytest

from tests.families import FAMILIES
from tests.simulated_cuda.own_process import passes

pytest.importorskip("triton")

ENGINE = "tests/engine"


def test_one_family_gives_the_reference_answers() -> None:
    passes(f"{ENGINE}/test_same_answers.py", "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_reference_answers_in_every_mode(family: str) -> None:
    """Unmerged, merged and mixed, mode switches, chunked prompts, preemption, adapters loaded by threads, video."""
    others = " and ".join(f"not {other}" for other in FAMILIES if other != family and family in other)
    passes(f"{ENGINE}/test_same_answers.py", "-k", f"{family} and {others}" if others else family)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "module", ["test_heads", "test_relocation", "test_in_place_answers", "test_swap", "test_reuse"]
)
def test_other_oracle_tests(module: str) -> None:
    passes(f"{ENGINE}/test_{module}.py", "-k", "not llava and not qwen3")


@pytest.mark.slow
def test_disabled_parts_of_the_engine_are_found() -> None:
    passes(f"{ENGINE}/test_negative_controls.py")
