"""Ranks under the mixed load of a busy server: requests cancelled between steps, adapters num_unloaded while in use or
being loaded, preemption, prompt reuse, chunked prompts and switches. All finished answers are those of plain
transformers + PEFT.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest

from tests.engine.asking import ask as ask_for
from tests.engine.asking import tokens
from tests.harness import FixedModes, RecordingEngine
from tests.parallel.test_same_answers import Family
from vlora.engine.tensor_parallel.coordinator import TensorParallelRunner
from vlora.types import Mode, RequestOutput

NUM_REQUESTS = 28
NUM_TOKENS = 60
MODES = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "blocks4"), (Mode.MIXED, "patterned16")]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def recorded(family: Family) -> Iterator[RecordingEngine]:
    made = RecordingEngine(
        copy.copy(family),
        FixedModes(*MODES[0], plan=MODES),
        checkpoint=family.checkpoint,
        max_step_tokens=48,
        scarce_memory=True,
        background=True,
        tensor_parallel=2,
        sharding=("wide8=slora", "patterned16=slora", "*=replicated"),
        threads=1,
        encode_share=1e9,  # requests that start one after the other rarely fill the memory together
    )
    yield made
    made.engine.close()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("no_kv_admission")
def test_finished_answers_are_correct_under_mixed_load(family: Family, recorded: RecordingEngine) -> None:
    draws = random.Random(4)
    expected = [family.answer(adapter, prompt, NUM_TOKENS)[0] for adapter, prompt in family.cases]
    engine = recorded.engine
    cases_of: dict[str, int] = {}  # case by request
    outputs: dict[str, list[RequestOutput]] = {}
    num_cancelled = num_unloaded = 0

    def take(new: tuple[RequestOutput, ...]) -> None:
        for output in new:
            outputs[output.request_id].append(output)

    def is_over(name: str) -> bool:
        return bool(outputs[name]) and outputs[name][-1].finished

    def ask() -> None:
        name, case = f"r{len(cases_of)}", draws.randrange(len(family.cases))
        adapter, prompt = family.cases[case]
        cases_of[name], outputs[name] = case, []
        engine.add(ask_for(prompt, name, adapter, NUM_TOKENS))

    while engine.has_work or len(cases_of) < NUM_REQUESTS:
        if len(cases_of) < NUM_REQUESTS:
            for _ in range(draws.choice((1, 2, 3))):
                ask()
        living = [name for name in cases_of if not is_over(name)]
        if living and draws.random() < 0.02:
            num_cancelled += 1
            output = engine.cancel(draws.choice(living))
            assert output is not None
            take((output,))
        if draws.random() < 0.015:
            num_unloaded += 1
            name = draws.choice(list(family.adapters))
            take(engine.unload_adapter(name))
            engine.register_adapters({name: family.adapters[name]})
        take(engine.step())
        engine.check_integrity()

    answered = 0
    for name, case in cases_of.items():
        assert is_over(name)
        if outputs[name][-1].finish_reason == "length":
            answered += 1
            assert tokens(outputs[name]) == expected[case]
        else:
            error = outputs[name][-1].error  # cancelled, or its adapter was num_unloaded: no other error
            assert error is not None and error.code in ("cancelled", "aborted"), error
    stats = engine.stats()
    cached = [out[-1].timings.num_cached_tokens for out in outputs.values() if out[-1].timings is not None]
    assert answered > NUM_REQUESTS // 3 and num_cancelled > 1 and num_unloaded > 1
    assert stats.num_switches > 0 and any(cached)
    assert isinstance(engine.parts.runner, TensorParallelRunner)
    assert engine.parts.runner.num_requests == 0, "other ranks keep finished requests"
    assert stats.num_preemptions > 0
