"""More requests than the engine can answer in time: each gets its own complete answer, or a typed refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.asking import ask, finish, tokens
from tests.families import build_model, make_prompt
from vlora.engine import LocalEngine
from vlora.types import Request, RequestOutput

FAMILY = "llava"
Engines = Callable[..., LocalEngine]
ADAPTERS = (None, "wide8", "everywhere64")


PROMPT = make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1)


def numbered(number: int, **changes: Any) -> Request:
    return ask(PROMPT, f"r{number}", ADAPTERS[number % 3], 4, **changes)


@pytest.mark.parametrize("policy", ["algorithm1", "cost_based"])
def test_every_request_of_an_overload_is_answered_or_refused(
    llava_engine: Callable[..., LocalEngine], policy: str
) -> None:
    local = llava_engine(max_batch_size=4, policy=policy, weight=("*=1",))
    right = [tokens(local.run([numbered(number)])[f"r{number}"]) for number in range(3)]
    # By the learned step times no step can meet the shortest bound.
    bounds = (None, 60.0, 1e-5, 0.03)
    crowd = [numbered(i, max_ttft_s=bounds[i % 4], priority=i % 5 - 2) for i in range(60)]
    outputs = local.run(crowd)
    for number, request in enumerate(crowd):
        found = outputs[request.request_id]
        assert [output.finished for output in found].count(True) == 1 and found[-1].finished
        last = found[-1]
        assert last.timings is not None
        if last.error is None:
            assert tokens(found) == right[number % 3]
        else:
            assert last.error.code == "deadline_unreachable" and "deadline cannot be met" in last.error.message
            assert not tokens(found) and last.timings.steps_by_mode == {}
        assert (request.max_ttft_s is None and last.error is None) or request.max_ttft_s is not None
    codes = {bound: {r.request_id for r in crowd if r.max_ttft_s == bound} for bound in bounds}
    assert all(outputs[request_id][-1].error is None for request_id in codes[60.0])
    assert all(outputs[request_id][-1].error is not None for request_id in codes[1e-5])
    assert not local.engine.has_work
    local.engine.check_integrity()


def test_a_refusal_does_not_wait_for_the_step_of_others(llava_engine: Engines) -> None:
    local = llava_engine(max_batch_size=4)
    for number in range(3):
        local.run([numbered(number)])  # the engine learns its step times
    engine, steps_before = local.engine, []
    sent: list[RequestOutput] = []

    def send(outputs: tuple[RequestOutput, ...]) -> None:
        sent.extend(outputs)
        steps_before.append(sum(engine.stats().steps_by_mode.values()))

    num_steps = sum(engine.stats().steps_by_mode.values())
    engine.add(numbered(3))
    engine.add(numbered(4, max_ttft_s=1e-9))
    engine.send_early = send
    returned = engine.step()
    assert [output.request_id for output in sent] == ["r4"] and sent[0].error is not None
    assert steps_before == [num_steps]  # before the step that computes the other request
    assert all(output.request_id == "r3" for output in returned)
    engine.send_early = None
    engine.add(numbered(4))  # its id is free again
    engine.add(numbered(5, max_ttft_s=1e-9))
    assert "r5" in {output.request_id for output in engine.step()}  # without a receiver it is returned
    finish(engine)


def test_the_engine_s_bound_applies_to_requests_without_one(llava_engine: Engines) -> None:
    local = llava_engine(max_batch_size=4, max_ttft_s=1e-5)
    for number in range(3):
        local.run([numbered(number, max_ttft_s=60.0)])
    outputs = local.run([numbered(3), numbered(4, max_ttft_s=60.0)])
    error = outputs["r3"][-1].error
    assert error is not None and error.code == "deadline_unreachable"
    assert outputs["r4"][-1].finish_reason == "length", outputs["r4"][-1].error
