"""The queue of a base executor under a fake clock."""

from __future__ import annotations

import dataclasses
import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.split.batching import Call, CallQueue

SHORT_S, LONG_S = 0.001, 0.008


def queue(**settings: float) -> CallQueue[str]:
    made: CallQueue[str] = CallQueue(**{"max_wait_s": 0.01, "join_rows": 64, **settings})  # type: ignore[arg-type]
    for client in "abc":
        made.join(client)
    return made


def keys(calls: object) -> list[str]:
    return sorted(call.client for call in calls)  # type: ignore[attr-defined]


def pass_layers(calls: CallQueue[str], client: str, layers: int, *, rows: int = 1, now: float = 0.0) -> None:
    """Let a client call layers 0, 1, ..., each answered at once, so that their durations are known."""
    for layer in range(layers):
        calls.add(Call(client, layer, rows, now))
        batch = calls.next(now + 1)
        assert keys(batch) == [client]
        calls.computed(batch, SHORT_S if rows < 8 else LONG_S, now)


def test_calls_of_one_layer_are_computed_together() -> None:
    calls = queue()
    for client in "abc":
        calls.add(Call(client, "layer 1" if client != "c" else "layer 2", 4, 0.0))
    assert keys(calls.next(0.0)) == ["a", "b"]
    assert keys(calls.next(0.0)) == ["c"]
    assert calls.next(0.0) == () and calls.wait_s(0.0) is None


def test_calls_of_many_rows_are_computed_alone() -> None:
    calls = queue(join_rows=8)
    for client, rows in (("a", 8), ("b", 9), ("c", 1)):
        calls.add(Call(client, 0, rows, 0.0))
    assert sorted(map(keys, iter(lambda: calls.next(0.0), ()))) == [["a", "c"], ["b"], ["b"]]


def test_a_client_ahead_waits_for_one_behind() -> None:
    calls = queue()
    pass_layers(calls, "a", 10)
    pass_layers(calls, "b", 8)
    pass_layers(calls, "a", 9, now=1.0)
    calls.add(Call("b", 8, 1, 1.0))
    assert keys(calls.next(1.0)) == ["b"]  # it is behind, and does not wait
    calls.computed([Call("b", 8, 1, 1.0)], SHORT_S, 1.0)
    calls.add(Call("a", 9, 1, 1.0))
    assert calls.next(1.0) == () and calls.wait_s(1.0) == pytest.approx(2 * SHORT_S)
    calls.add(Call("b", 9, 1, 1.0005))
    assert keys(calls.next(1.0005)) == ["a", "b"]


def test_a_wait_ends_when_nobody_comes() -> None:
    calls = queue()
    pass_layers(calls, "a", 10)
    pass_layers(calls, "b", 8)
    calls.add(Call("a", 9, 1, 0.0))
    assert calls.next(0.0019) == ()
    assert keys(calls.next(0.0021)) == ["a"]


def test_large_requests_may_wait_longer() -> None:
    waits = {}
    for rows in (1, 32):
        calls = queue(max_wait_s=1.0)
        pass_layers(calls, "a", 10, rows=rows)
        pass_layers(calls, "b", 8, rows=rows)
        calls.add(Call("a", 9, rows, 0.0))
        waits[rows] = calls.wait_s(0.0)
    assert waits == {1: pytest.approx(2 * SHORT_S), 32: pytest.approx(2 * LONG_S)}


def test_a_small_request_does_not_wait_for_a_much_larger_one() -> None:
    for ours, theirs, waits in ((1, 4, True), (1, 5, False), (32, 1, True)):
        calls = queue()
        pass_layers(calls, "a", 10, rows=ours)
        pass_layers(calls, "b", 8, rows=theirs)
        calls.add(Call("a", 9, ours, 0.0))
        assert (calls.next(0.0) == ()) == waits


@pytest.mark.parametrize("settings", [{"max_wait_s": 0.0}, {"max_wait_s": 0.0005}])
def test_the_wait_is_bounded(settings: dict[str, float]) -> None:
    calls = queue(**settings)
    pass_layers(calls, "a", 10)
    pass_layers(calls, "b", 8)
    calls.add(Call("a", 9, 1, 0.0))
    assert calls.wait_s(0.0) == pytest.approx(settings["max_wait_s"])


def test_an_idle_client_and_one_that_left_are_not_waited_for() -> None:
    for gone in (True, False):
        calls = queue()
        pass_layers(calls, "a", 10)
        pass_layers(calls, "b", 8)
        if gone:
            calls.leave("b")
        calls.add(Call("a", 9, 1, 0.0 if gone else 5.0))
        assert keys(calls.next(0.0 if gone else 5.0)) == ["a"]


def test_a_client_that_leaves_takes_its_call_with_it() -> None:
    calls = queue()
    calls.add(Call("a", 0, 1, 0.0))
    calls.leave("a")
    assert not len(calls) and calls.next(0.0) == ()


def test_clients_with_fewer_rows_come_first() -> None:
    calls = queue()
    order, rows = [], {"a": 128, "b": 1}
    calls.add(Call("a", "big", 128, 0.0))
    calls.add(Call("b", "small", 1, 0.0))
    for step in range(40):
        (call,) = calls.next(float(step) / 10)
        order.append(call.client)
        if call.client == "b" or call.first:
            calls.add(dataclasses.replace(call, rows=rows[call.client], first=0, arrived=step / 10))
    # Both always wait. A row costs both the same, and a product 16 rows more; large calls are computed in two.
    assert order.count("a") == pytest.approx(40 * 17 / (17 + 80), abs=1)
    assert calls.rows_served == {"a": 64 * order.count("a"), "b": order.count("b"), "c": 0}


def test_a_late_client_gets_no_credit_for_its_absence() -> None:
    calls = queue()
    for step in range(100):
        calls.add(Call("a", 0, 64, float(step)))
        calls.next(float(step))
    calls.join("late")
    calls.add(Call("a", 0, 64, 100.0))
    calls.add(Call("late", 1, 64, 100.0))
    calls.leave("c")
    calls.leave("b")
    calls.join("later")
    calls.add(Call("later", 2, 64, 100.0))
    served = [calls.next(100.0)[0].client for _ in range(3)]
    assert served.index("later") > 0  # b and c had not been served, so "late" starts like them


def test_a_client_that_returns_gets_no_credit_for_its_idle_time() -> None:
    calls = queue()
    for step in range(40):
        calls.add(Call("a", 0, 64, float(step)))
        calls.next(float(step))
    calls.add(Call("a", 0, 64, 40.0))
    calls.add(Call("b", 1, 64, 40.0))
    served = []
    for _ in range(8):
        (call,) = calls.next(40.0)
        served.append(call.client)
        calls.add(dataclasses.replace(call, first=0))
    assert served.count("a") == served.count("b") == 4


def test_a_client_that_used_much_is_not_stopped_for_long() -> None:
    calls = queue()
    for step in range(1000):
        calls.add(Call("a", step % 2, 1000, 0.0))
        calls.computed(calls.next(0.0), 0.01, 0.0)
    calls.add(Call("b", 0, 1, 0.0))  # it was connected meanwhile
    products = 0
    while products < 5000:
        (call,) = calls.next(0.0)
        if call.client == "a":
            break
        products += 1
        calls.add(Call("b", products % 2, 1, 0.0))
        if products == 1:
            calls.add(Call("a", 0, 1000, 0.0))
    assert 200 < products <= 1 + 4096 / 17


@given(st.integers(0, 10_000))
def test_every_call_is_computed_once_and_in_time(seed: int) -> None:
    """Clients in closed loops over layers: none starves, each row is computed once, no call waits beyond the bound."""
    draw = random.Random(seed)
    calls = queue(max_wait_s=0.005)
    now, free_at, done = 0.0, 0.0, {client: 0 for client in "abc"}
    rows = {client: draw.choice((1, 4, 100)) for client in "abc"}
    computed = dict.fromkeys("abc", 0)
    arrivals = [(draw.random() / 100, client) for client in "abc"]
    heapq.heapify(arrivals)
    for _ in range(400):
        while arrivals and arrivals[0][0] <= now:
            at, client = heapq.heappop(arrivals)
            calls.add(Call(client, done[client] % 12, rows[client], at))
        batch = calls.next(now)
        if not batch:
            wait = calls.wait_s(now)
            coming = arrivals[0][0] - now if arrivals else None
            assert wait is None or wait <= 0.005
            now += min(each for each in (wait, coming) if each is not None) + 1e-9
            continue
        assert len({call.key for call in batch}) == 1
        # At most the other two are served first before a call's wait ends.
        assert all(now - call.arrived < 0.005 + 100 * 0.002 for call in batch)
        took = 0.0005 + 0.00001 * sum(call.rows for call in batch)
        now += took
        calls.computed(batch, took, now)
        for call in batch:
            assert call.first == computed[call.client]
            computed[call.client] += call.rows
            if computed[call.client] == rows[call.client]:
                computed[call.client] = 0
                done[call.client] += 1
                heapq.heappush(arrivals, (now + draw.random() / 1000, call.client))
    assert min(done.values()) > 3 and free_at == 0.0


def run_decoders(calls: CallQueue[str], starts: list[float], passes: int) -> tuple[int, int, float]:
    """Clients that decode: 24 layers of 1 ms, whatever the rows, and 0.2 ms of their own. (batches, calls, time)"""
    clients = [f"decoder-{index}" for index in range(len(starts))]
    for client in clients:
        calls.join(client)
    arrivals = list(zip(starts, clients, strict=True))
    heapq.heapify(arrivals)
    done = dict.fromkeys(clients, 0)
    now, batches, computed = 0.0, 0, 0
    while arrivals or len(calls):
        while arrivals and arrivals[0][0] <= now:
            at, client = heapq.heappop(arrivals)
            calls.add(Call(client, done[client] % 24, 1, at))
        batch = calls.next(now)
        if not batch:
            wait = calls.wait_s(now)
            coming = arrivals[0][0] - now if arrivals else None
            now += min(each for each in (wait, coming) if each is not None) + 1e-9
            continue
        now += 0.001
        calls.computed(batch, 0.001, now)
        batches, computed = batches + 1, computed + len(batch)
        for place, call in enumerate(batch):
            done[call.client] += 1
            if done[call.client] < 24 * passes:
                heapq.heappush(arrivals, (now + 0.0002 * (1 + place / 4), call.client))
    return batches, computed, now


def test_decoders_that_start_apart_come_to_travel_together() -> None:
    starts = [0.0, 0.005, 0.011, 0.017]
    patient: CallQueue[str] = CallQueue()
    batches, computed, took = run_decoders(patient, starts, 30)
    assert computed == 4 * 24 * 30 and computed / batches > 3.5
    without: CallQueue[str] = CallQueue(max_wait_s=0.0)
    alone_batches, _, alone_took = run_decoders(without, starts, 30)
    assert computed / alone_batches < 2.1, "they travel together without waiting: the test shows nothing"
    assert took < 0.75 * alone_took
