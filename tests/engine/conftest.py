"""References that modules share, and fixtures of the tests of adapters that come and go (`swapping.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import swapping
from tests.engine.asking import ask, tokens
from tests.engine.forms import FormReference
from tests.families import Prompt, build_model, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine


@pytest.fixture(scope="session")
def form_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], FormReference]:
    """The reference of a form and a family, built once while tests ask for few others: PEFT's answers cost most."""

    @functools.lru_cache(maxsize=8)
    def made(form: str, family: str) -> FormReference:
        return FormReference(form, family, tmp_path_factory.mktemp(form))

    return made


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


@pytest.fixture
def llava_engine(adapters_of_family: Callable[[str], dict[str, str]]) -> Callable[..., LocalEngine]:
    """Makes engines with LLaVA and two of the oracle's adapters. `folders`: where the adapters are instead."""

    def make(folders: dict[str, str] | None = None, **settings: Any) -> LocalEngine:
        config = EngineConfig(model="llava", **{"arena_bytes": 32 * 2**20, "max_context": 256, **settings})
        local = LocalEngine(config, model=build_model("llava"))
        for name in ("wide8", "everywhere64"):
            local.engine.load_adapter(name, (folders or adapters_of_family("llava"))[name])
        return local

    return make
