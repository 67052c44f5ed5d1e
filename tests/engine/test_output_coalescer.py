"""Whole answers: one message with every token, whatever else is answered. Streams: as many messages as can be read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlora.engine.ipc.output_coalescer import PACE_S, SEARCH_PACE_S, Gathering
from vlora.errors import StepFailed
from vlora.types import ErrorValue, Request, RequestOutput, SamplingParams, TokenScore


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2))),
    st.lists(st.sampled_from((0.0, 0.001, 0.004, 0.5)), min_size=1),
)
def test_tokens_come_once_and_in_order_whoever_else_answers(
    steps: list[tuple[str, list[int], int]], waits: list[float]
) -> None:
    """a and b request whole answers, d has a stop string, c has no options; outputs are grouped by step."""
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    for request in (_asked("a", whole=True), _asked("b", whole=True), _asked("c"), _asked("d", stop=("end",))):
        gathering.expect(request)
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
    gathering.expect(_asked("a", whole=True))
    score = TokenScore(-0.5, ())
    assert gathering.pass_on([RequestOutput(request_id="a", token_ids=(1,), scores=(score,))]) == ()
    error = ErrorValue.of(StepFailed("the step failed"))
    (last,) = gathering.pass_on([RequestOutput(request_id="a", finish_reason="error", error=error)])
    assert last.token_ids == (1,) and last.scores == (score,) and last.error == error
    again = RequestOutput(request_id="a", token_ids=(2,))
    assert gathering.pass_on([again]) == (again,)


def test_a_stream_of_short_steps_is_told_at_its_pace() -> None:
    """Its first tokens and its end are sent at once; the others at its pace, minus the last step's length. A stream
    with stop strings has its own pace, and flushes the other streams.
    """
    for stop, pace_s, places in (((), PACE_S, [0, 18, 36]), (("end",), SEARCH_PACE_S, [0, 4, 8, 12, 16, 20])):
        now = [0.0]
        gathering = Gathering(lambda now=now: now[0])  # type: ignore[misc]
        gathering.expect(_asked("a", stop=stop))
        gathering.expect(_asked("beside"))
        told: dict[str, list[list[int]]] = {"a": [], "beside": []}
        sent_s: list[float] = []
        at: list[int] = []
        for number in range(places[-1] + 3):
            now[0] += 0.0022
            if passed := gathering.pass_on([_token("a", number), _token("beside", number)]):
                at.append(number)
                sent_s.append(now[0])
            for output in passed:
                told[output.request_id].append(list(output.token_ids))
        assert at == places and all(b - a <= pace_s for a, b in itertools.pairwise(sent_s))
        assert told["a"] == told["beside"] == [list(range(a + 1, b + 1)) for a, b in itertools.pairwise([-1, *at])]
        end = RequestOutput(request_id="a", token_ids=(99,), finish_reason="length")
        (last, beside) = gathering.pass_on([end])
        assert last.token_ids == (at[-1] + 1, at[-1] + 2, 99) and last.finish_reason == "length"
        assert beside.token_ids == (at[-1] + 1, at[-1] + 2)


def test_the_pace_is_its_own_again_when_the_one_with_stop_strings_has_ended() -> None:
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    gathering.expect(_asked("searched", stop=("end",)))
    gathering.pass_on([_token("searched", 0), _token("a", 0)])
    gathering.pass_on([RequestOutput(request_id="searched", finish_reason="stop")])
    for _ in range(3):
        now[0] += SEARCH_PACE_S
        assert gathering.pass_on([_token("a", 1)]) == ()
    now[0] += SEARCH_PACE_S
    assert gathering.pass_on([_token("a", 1)]) == (_token("a", 1, 1, 1, 1),)


def test_a_stream_of_long_steps_is_told_after_each() -> None:
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    for number in range(5):
        now[0] += PACE_S
        assert gathering.pass_on([_token("a", number)]) == (_token("a", number),)


def test_whatever_is_told_takes_along_what_streams_have() -> None:
    """The reader wakes up anyway, so it gets everything; and all tokens are flushed before a long step."""
    gathering = Gathering(lambda: 0.0)
    gathering.expect(_asked("whole", whole=True))
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


def _asked(name: str, *, whole: bool = False, stop: tuple[str, ...] = ()) -> Request:
    return Request(request_id=name, prompt_ids=(1,), sampling=SamplingParams(stop=stop), whole=whole)


def _token(name: str, *tokens: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=tokens)
