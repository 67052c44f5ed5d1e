"""Fixtures of the tests of adapters that come and go (`swapping.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine import swapping
from tests.engine.asking import ask, tokens
from tests.families import Prompt, build_model, make_prompt


@pytest.fixture(scope="session")
def plain_prompt() -> Prompt:
    """Without images, which take extra steps: some tests count steps."""
    return make_prompt(swapping.FAMILY, build_model(swapping.FAMILY), 0, num_images=0)


@pytest.fixture(scope="session")
def swapped_answers(
    adapters_of_family: Callable[[str], dict[str, str]], plain_prompt: Prompt
) -> dict[str | None, list[int]]:
    """Every adapter's answer, loaded and run one at a time."""
    local = swapping.make_engine()
    found: dict[str | None, list[int]] = {}
    for adapter, path in (None, ""), *adapters_of_family(swapping.FAMILY).items():
        if adapter is not None:
            local.engine.load_adapter(adapter, path)
        found[adapter] = tokens(local.run([ask(plain_prompt, "r", adapter, swapping.ANSWER)])["r"])
    assert len({tuple(tokens) for tokens in found.values()}) == len(found), "equal answers would prove nothing"
    return found


@pytest.fixture
def story(
    adapters_of_family: Callable[[str], dict[str, str]],
    plain_prompt: Prompt,
    swapped_answers: dict[str | None, list[int]],
) -> swapping.Story:
    return swapping.Story(plain_prompt, adapters_of_family(swapping.FAMILY), swapped_answers)
