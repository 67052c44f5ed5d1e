"""Whole answers: one message with every token, whatever else is answered. Streams: as many messages as can be read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlora.engine.ipc.worker import PACE_S, SEARCH_PACE_S, OutputCoalescer
from vlora.errors import StepFailed
from vlora.types import ErrorValue, Request, RequestOutput, SamplingParams, TokenScore


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2))),
    st.lists(st.sampled_from((0.0, 0.001, 0.004, 0.5)), min_size=1),
)
def test_tokens_are_sent_once_and_in_order(steps: list[tuple[str, list[int], int]], waits: list[float]) -> None:
    """a and b request whole answers, d has a stop string, c has no options; outputs are grouped by step."""
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    for request in (_request("a", whole=True), _request("b", whole=True), _request("c"), _request("d", stop=("end",))):
        coalescer.add(request)
    expected: dict[str, list[int]] = {"a": [], "b": [], "c": [], "d": []}
    group: list[RequestOutput] = []
    sent_now: list[RequestOutput] = []
    for (name, tokens, ends_group), wait in zip(steps, itertools.cycle(waits), strict=False):
        now[0] += wait
        expected[name] += tokens
        group.append(RequestOutput(request_id=name, token_ids=tuple(tokens)))
        if ends_group:
            sent_now += coalescer.coalesce(group)
            group.clear()
    sent_now += coalescer.coalesce(group)
    sent_now += coalescer.flush()
    assert all(output.request_id in "cd" for output in sent_now)
    sent_now += coalescer.coalesce(RequestOutput(request_id=name, finish_reason="length") for name in expected)
    for name, tokens in expected.items():
        mine = [output for output in sent_now if output.request_id == name]
        assert [token for output in mine for token in output.token_ids] == tokens
        assert mine[-1].finish_reason == "length"
        assert name in "cd" or len(mine) == 1


def test_scores_and_errors_stay_with_their_answer_and_ids_can_be_reused() -> None:
    coalescer = OutputCoalescer()
    coalescer.add(_request("a", whole=True))
    score = TokenScore(-0.5, ())
    assert coalescer.coalesce([RequestOutput(request_id="a", token_ids=(1,), scores=(score,))]) == ()
    error = ErrorValue.of(StepFailed("the step failed"))
    (last,) = coalescer.coalesce([RequestOutput(request_id="a", finish_reason="error", error=error)])
    assert last.token_ids == (1,) and last.scores == (score,) and last.error == error
    again = RequestOutput(request_id="a", token_ids=(2,))
    assert coalescer.coalesce([again]) == (again,)


def test_a_stream_of_short_steps_is_sent_at_its_pace() -> None:
    """Its first tokens and its end are sent at once; the others at its pace, minus the last step's length. A stream
    with stop strings has its own pace, and flushes the other streams.
    """
    for stop, pace_s, places in (((), PACE_S, [0, 18, 36]), (("end",), SEARCH_PACE_S, [0, 4, 8, 12, 16, 20])):
        now = [0.0]
        coalescer = OutputCoalescer(lambda now=now: now[0])  # type: ignore[misc]
        coalescer.add(_request("a", stop=stop))
        coalescer.add(_request("beside"))
        sent: dict[str, list[list[int]]] = {"a": [], "beside": []}
        sent_s: list[float] = []
        at: list[int] = []
        for number in range(places[-1] + 3):
            now[0] += 0.0022
            if sent_now := coalescer.coalesce([_token("a", number), _token("beside", number)]):
                at.append(number)
                sent_s.append(now[0])
            for output in sent_now:
                sent[output.request_id].append(list(output.token_ids))
        assert at == places and all(b - a <= pace_s for a, b in itertools.pairwise(sent_s))
        assert sent["a"] == sent["beside"] == [list(range(a + 1, b + 1)) for a, b in itertools.pairwise([-1, *at])]
        end = RequestOutput(request_id="a", token_ids=(99,), finish_reason="length")
        (last, beside) = coalescer.coalesce([end])
        assert last.token_ids == (at[-1] + 1, at[-1] + 2, 99) and last.finish_reason == "length"
        assert beside.token_ids == (at[-1] + 1, at[-1] + 2)


def test_the_search_pace_ends_with_the_last_stream_with_stop_strings() -> None:
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    coalescer.add(_request("searched", stop=("end",)))
    coalescer.coalesce([_token("searched", 0), _token("a", 0)])
    coalescer.coalesce([RequestOutput(request_id="searched", finish_reason="stop")])
    for _ in range(3):
        now[0] += SEARCH_PACE_S
        assert coalescer.coalesce([_token("a", 1)]) == ()
    now[0] += SEARCH_PACE_S
    assert coalescer.coalesce([_token("a", 1)]) == (_token("a", 1, 1, 1, 1),)


def test_a_stream_of_long_steps_is_sent_after_each_step() -> None:
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    for number in range(5):
        now[0] += PACE_S
        assert coalescer.coalesce([_token("a", number)]) == (_token("a", number),)


def test_each_message_includes_the_held_tokens_of_all_streams() -> None:
    """The reader wakes up anyway, so it gets everything; and all tokens are flushed before a long step."""
    coalescer = OutputCoalescer(lambda: 0.0)
    coalescer.add(_request("whole", whole=True))
    for name in "ab":
        assert coalescer.coalesce([_token(name, 0)]) == (_token(name, 0),)
    assert coalescer.coalesce([_token("a", 1), _token("b", 1), _token("whole", 1)]) == ()
    assert coalescer.coalesce([_token("a", 2), _token("new", 1)]) == (
        _token("new", 1),
        _token("a", 1, 2),
        _token("b", 1),
    )
    assert coalescer.coalesce([_token("b", 2)]) == ()
    assert coalescer.flush() == (_token("b", 2),) and coalescer.flush() == ()


def _request(name: str, *, whole: bool = False, stop: tuple[str, ...] = ()) -> Request:
    return Request(request_id=name, prompt_ids=(1,), sampling=SamplingParams(stop=stop), whole=whole)


def _token(name: str, *tokens: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=tokens)
