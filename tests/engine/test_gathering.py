"""Whole answers: one message with every token, whoever else is answered; what did not ask for it passes as it came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlora.engine.gathering import Gathering
from vlora.errors import StepFailed
from vlora.types import ErrorValue, RequestOutput, TokenScore


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2))))
def test_tokens_come_once_and_in_order_whoever_else_answers(steps: list[tuple[str, list[int], int]]) -> None:
    """a and b ask for whole answers, c does not; steps cut what the engine says into groups."""
    gathering = Gathering()
    gathering.hold("a")
    gathering.hold("b")
    said: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    group: list[RequestOutput] = []
    passed: list[RequestOutput] = []
    for name, tokens, ends_group in steps:
        said[name] += tokens
        group.append(RequestOutput(request_id=name, token_ids=tuple(tokens)))
        if ends_group:
            passed += gathering.pass_on(group)
            group.clear()
    passed += gathering.pass_on(group)
    assert all(output.request_id == "c" for output in passed)
    passed += gathering.pass_on(RequestOutput(request_id=name, finish_reason="length") for name in said)
    for name, tokens in said.items():
        mine = [output for output in passed if output.request_id == name]
        assert [token for output in mine for token in output.token_ids] == tokens
        assert mine[-1].finish_reason == "length"
        assert name == "c" or len(mine) == 1


def test_scores_and_errors_stay_with_their_answer_and_an_id_can_be_used_again() -> None:
    gathering = Gathering()
    gathering.hold("a")
    score = TokenScore(-0.5, ())
    assert gathering.pass_on([RequestOutput(request_id="a", token_ids=(1,), scores=(score,))]) == ()
    error = ErrorValue.of(StepFailed("the step failed"))
    (last,) = gathering.pass_on([RequestOutput(request_id="a", finish_reason="error", error=error)])
    assert last.token_ids == (1,) and last.scores == (score,) and last.error == error
    again = RequestOutput(request_id="a", token_ids=(2,))
    assert gathering.pass_on([again]) == (again,)
