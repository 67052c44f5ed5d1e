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
    """Unmerged, merged and mixed, mode switches, chunked prompts, preemption, adapters loaded by threads, video.

    Of the tests that differ only by the merged adapter or the policy, one runs.
    """
    longer = [other for other in FAMILIES if other != family and family in other]
    others = ["patterned16", "narrow4", "everywhere64", "algorithm_1", "paper", *longer]
    passes(f"{ENGINE}/test_same_answers.py", "-k", " and not ".join([family, *others]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", ["heads", "relocation", "in_place_answers", "swap"])
def test_other_oracle_tests(module: str) -> None:
    passes(f"{ENGINE}/test_{module}.py", "-k", "not qwen3_vl and not (llava and not swap)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_disabled_parts_of_the_engine_are_found() -> None:
    passes(f"{ENGINE}/test_negative_controls.py")
