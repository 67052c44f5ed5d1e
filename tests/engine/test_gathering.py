"""Whole answers: one message with every token, whoever else is answered. Streams: as many messages as can be read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlora.engine.gathering import PACE_S, Gathering
from vlora.errors import StepFailed
from vlora.types import ErrorValue, RequestOutput, TokenScore


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2))),
    st.lists(st.sampled_from((0.0, 0.001, 0.004, 0.5)), min_size=1),
)
def test_tokens_come_once_and_in_order_whoever_else_answers(
    steps: list[tuple[str, list[int], int]], waits: list[float]
) -> None:
    """a and b ask for whole answers, c and d do not; steps cut what the engine says into groups."""
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    gathering.hold("a")
    gathering.hold("b")
    said: dict[str, list[int]] = {"a": [], "b": [], "c": [], "d": []}
    group: list[RequestOutput] = []
    passed: list[RequestOutput] = []
    for (name, tokens, ends_group), wait in zip(steps, itertools.cycle(waits), strict=False):
        now[0] += wait
        said[name] += tokens
        group.append(RequestOutput(request_id=name, token_ids=tuple(tokens)))
        if ends_group:
            passed += gathering.pass_on(group)
            group.clear()
    passed += gathering.pass_on(group)
    passed += gathering.release()
    assert all(output.request_id in "cd" for output in passed)
    passed += gathering.pass_on(RequestOutput(request_id=name, finish_reason="length") for name in said)
    for name, tokens in said.items():
        mine = [output for output in passed if output.request_id == name]
        assert [token for output in mine for token in output.token_ids] == tokens
        assert mine[-1].finish_reason == "length"
        assert name in "cd" or len(mine) == 1


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


def test_a_stream_of_short_steps_is_told_at_its_pace() -> None:
    """Its first tokens and its end at once; in between as often as the pace says, the last step's length ahead."""
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    told = []
    for number in range(11):
        now[0] += 0.0022
        told.append(gathering.pass_on([_token("a", number)]))
    assert [number for number, each in enumerate(told) if each] == [0, 4, 8]
    assert (
        told[0] == (_token("a", 0),) and told[4] == (_token("a", 1, 2, 3, 4),) and told[8] == (_token("a", 5, 6, 7, 8),)
    )
    end = RequestOutput(request_id="a", token_ids=(11,), finish_reason="length")
    (last,) = gathering.pass_on([end])
    assert last.token_ids == (9, 10, 11) and last.finish_reason == "length"


def test_a_stream_of_long_steps_is_told_after_each() -> None:
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    for number in range(5):
        now[0] += PACE_S
        assert gathering.pass_on([_token("a", number)]) == (_token("a", number),)


def test_whatever_is_told_takes_along_what_streams_have() -> None:
    """Who is woken anyway reads all; and before a long step all is told."""
    gathering = Gathering(lambda: 0.0)
    gathering.hold("whole")
    for name in "ab":
        assert gathering.pass_on([_token(name, 0)]) == (_token(name, 0),)
    assert gathering.pass_on([_token("a", 1), _token("b", 1), _token("whole", 1)]) == ()
    assert gathering.pass_on([_token("a", 2), _token("new", 1)]) == (
        _token("new", 1),
        _token("a", 1, 2),
        _token("b", 1),
    )
    assert gathering.pass_on([_token("b", 2)]) == ()
    assert gathering.release() == (_token("b", 2),) and gathering.release() == ()


def _token(name: str, *tokens: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=tokens)
