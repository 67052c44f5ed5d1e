"""The queue of a base executor under a fake clock, decoding beside training, and pieces of calls on a real one."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.split.base_process import WholeCallQueue
from tests.example_counts import scaled
from tests.split.running import Serving, serving, tiny
from vlora.split import connect
from vlora.split.batching import Call, CallQueue
from vlora.split.connection import BaseConnection
from vlora.split.frames import Direction

SHORT_S, LONG_S = 0.001, 0.008


def joined(clients: Iterable[str] = "abc", **settings: Any) -> CallQueue[str]:
    made: CallQueue[str] = CallQueue(**settings)
    for client in clients:
        made.join(client)
    return made


def queue(**settings: Any) -> CallQueue[str]:
    return joined(**{"max_wait_s": 0.01, "join_rows": 64, **settings})


def apart(ahead: int = 1, behind: int = 1, **settings: Any) -> CallQueue[str]:
    """Client a is two layers ahead of b. ahead, behind: the rows of their calls."""
    calls = queue(**settings)
    pass_layers(calls, "a", 10, rows=ahead)
    pass_layers(calls, "b", 8, rows=behind)
    return calls


def serve(calls: CallQueue[str], client: str, now: float = 0.0, took_s: float = 0.001) -> None:
    """A call of one row is answered."""
    calls.add(Call(client, 0, 1, now))
    calls.computed(calls.next(now), took_s, now)


def keys(calls: object) -> list[str]:
    return sorted(call.client for call in calls)  # type: ignore[attr-defined]


def pass_layers(calls: CallQueue[str], client: str, layers: int, *, rows: int = 1, now: float = 0.0) -> None:
    """Let a client call layers 0, 1, ..., each answered at once, so that their durations are known."""
    for layer in range(layers):
        calls.add(Call(client, layer, rows, now))
        batch = calls.next(now + 1)
        assert keys(batch) == [client]
        calls.computed(batch, SHORT_S if rows < 8 else LONG_S, now)


def test_which_calls_are_computed_together() -> None:
    """Those of one layer, unless they have many rows. A client that leaves takes its call with it."""
    calls = queue(join_rows=8)
    for client, layer, rows in (("a", 1, 8), ("b", 1, 4), ("c", 2, 4)):
        calls.add(Call(client, layer, rows, 0.0))
    assert [keys(calls.next(0.0)) for _ in range(2)] == [["a", "b"], ["c"]]
    assert calls.next(0.0) == () and calls.wait_s(0.0) is None
    for client, rows in (("a", 8), ("b", 9), ("c", 1)):
        calls.add(Call(client, 0, rows, 0.0))
    assert sorted(map(keys, iter(lambda: calls.next(0.0), ()))) == [["a", "c"], ["b"], ["b"]]
    calls.add(Call("a", 0, 1, 0.0))
    calls.leave("a")
    assert not len(calls) and calls.next(0.0) == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "max_wait_s", "wait_s"),
    [
        (1, 1, 0.01, 2 * SHORT_S),
        (1, 1, 0.0, 0.0),
        (1, 1, 0.0005, 0.0005),
        # Large requests wait longer, and small ones not for much larger ones.
        (32, 32, 1.0, 2 * LONG_S),
        (1, 4, 1.0, 2 * SHORT_S),
        (1, 5, 1.0, 0.0),
        (32, 1, 1.0, 2 * LONG_S),
    ],
)
def test_a_client_ahead_waits_for_one_behind(ours: int, theirs: int, max_wait_s: float, wait_s: float) -> None:
    """The wait is bounded, and ends when the other one comes or does not come."""
    for comes in (True, False):
        calls = apart(ours, theirs, max_wait_s=max_wait_s)
        pass_layers(calls, "a", 9, rows=ours)
        calls.add(Call("b", 8, theirs, 0.0))
        assert keys(calls.next(0.0)) == ["b"], "it is behind, and does not wait"
        calls.computed([Call("b", 8, theirs, 0.0)], SHORT_S if theirs < 8 else LONG_S, 0.0)
        calls.add(Call("a", 9, ours, 0.0))
        assert calls.wait_s(0.0) == pytest.approx(wait_s)
        if wait_s:
            assert calls.next(0.95 * wait_s) == ()
            if comes:
                calls.add(Call("b", 9, theirs, 0.0))
        together = ["a", "b"] if comes and wait_s else ["a"]
        assert keys(calls.next(0.95 * wait_s if comes else 1.05 * wait_s)) == together


def test_an_idle_client_and_one_that_left_are_not_waited_for() -> None:
    for gone, now in ((True, 0.0), (False, 5.0)):
        calls = apart()
        if gone:
            calls.leave("b")
        calls.add(Call("a", 9, 1, now))
        assert keys(calls.next(now)) == ["a"]


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


def test_a_client_gets_no_credit_for_its_absence_or_idle_time() -> None:
    calls = queue()
    for step in range(100):
        calls.add(Call("a", 0, 64, float(step)))
        calls.next(float(step))
    calls.join("late")
    order = []
    for client in ("a", "b", "late"):
        calls.add(Call(client, client, 64, 100.0))
    for _ in range(12):
        (call,) = calls.next(100.0)
        order.append(call.client)
        calls.add(dataclasses.replace(call, first=0))
    assert order.count("a") == order.count("b") == 4, "b was idle"
    calls.leave("c")
    calls.leave("b")
    calls.join("later")
    calls.add(Call("later", "later", 64, 100.0))
    assert "later" in [calls.next(100.0)[0].client for _ in range(3)]


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


# -- simulated executors ----------------------------------------------------------------------------------------------

LAYERS = 12
DECODE_ROWS, TRAIN_ROWS = 2, 128


class Simulated(NamedTuple):
    """A client in a closed loop over layers.

    Attributes:
        rows: Of its calls.
        own_s: Its own work between an answer and its next call.
        trains: Each second pass is backward, and so is the first: before that, the queue takes it for inference.
    """

    rows: int
    own_s: float
    trains: bool = False

    def call(self, number: int, done: int, now: float) -> Call[int]:
        """Its call after as many as are done."""
        at, layer = divmod(done, LAYERS)
        backward = self.trains and at % 2 == 0
        return Call(number, (backward, layer), self.rows, now, backward=backward)


DECODER, TRAINER = Simulated(DECODE_ROWS, 0.001), Simulated(TRAIN_ROWS, 0.002, trains=True)


class Product(NamedTuple):
    """Seconds of a product: to read the weights of a layer, and of arithmetic for a row."""

    read_s: float = 0.004
    row_s: float = 0.0002

    def took_s(self, rows: int) -> float:
        return self.read_s + self.row_s * rows


SLOW = Product()


class Simulation(NamedTuple):
    """Seconds of a pass through all layers, by client; the executor's share of the time at work; calls in a product.

    longest_s: the longest wait of a call.
    """

    passes: Sequence[Sequence[float]]
    busy: float
    together: float
    longest_s: float

    def mean_s(self, clients: slice) -> float:
        return statistics.fmean(took for each in self.passes[clients] for took in each[3:])


def simulate(
    queue: CallQueue[int],
    clients: Sequence[Simulated],
    seconds: float,
    product: Product = SLOW,
    pace: Callable[[], float] = lambda: 1.0,
) -> Simulation:
    """Let clients start one after the other, and stop after `seconds`. pace: a factor of the clients' own work."""
    arrivals = [(0.003 * pace() * number, number) for number in range(len(clients))]
    done, begun = [0] * len(clients), [0.0] * len(clients)
    passes: list[list[float]] = [[] for _ in clients]
    computed = [0] * len(clients)
    now = busy = longest_s = 0.0
    batches: list[int] = []
    for number in range(len(clients)):
        queue.join(number)
    while now < seconds:
        while arrivals and arrivals[0][0] <= now:
            at, number = heapq.heappop(arrivals)
            if done[number] % LAYERS == 0:
                passes[number] += [at - begun[number]] if done[number] else []
                begun[number] = at
            # The executor reads calls that come during a product at its end.
            queue.add(clients[number].call(number, done[number], now))
        batch = queue.next(now)
        if not batch:
            wait_s, coming = queue.wait_s(now), arrivals[0][0] - now if arrivals else None
            now += min(each for each in (wait_s, coming) if each is not None) + 1e-9
            continue
        assert len({call.key for call in batch}) == 1
        longest_s = max(longest_s, *(now - call.arrived for call in batch))
        took = product.took_s(sum(call.rows for call in batch))
        now, busy = now + took, busy + took
        queue.computed(batch, took, now)
        batches.append(len(batch))
        for call in batch:
            assert call.first == computed[call.client], "each row is computed once"
            computed[call.client] += call.rows
            if computed[call.client] == clients[call.client].rows:
                computed[call.client] = 0
                done[call.client] += 1
                heapq.heappush(arrivals, (now + clients[call.client].own_s * pace(), call.client))
    return Simulation(passes, busy / now, statistics.fmean(batches), longest_s)


@given(st.integers(0, 10_000))
def test_every_call_is_computed_once_and_in_time(seed: int) -> None:
    draw = random.Random(seed)
    clients = [Simulated(draw.choice((1, 4, 100)), 0.001) for _ in range(3)]
    found = simulate(CallQueue(max_wait_s=0.005, join_rows=64), clients, 0.3, Product(0.0005, 0.00001), draw.random)
    assert all(found.passes), "none starves"
    assert found.longest_s < 0.005 + 100 * 0.002, "at most the other two are served first before a call's wait ends"


def test_decoders_that_start_apart_come_to_travel_together() -> None:
    decoders, flat = [Simulated(1, 0.0002 * (1 + place / 4)) for place in range(4)], Product(0.001, 0.0)
    patient = simulate(CallQueue(), decoders, 1.0, flat)
    without = simulate(CallQueue(max_wait_s=0.0), decoders, 1.0, flat)
    assert patient.together > 3.5
    assert without.together < 2.5, "they travel together without waiting: the test shows nothing"
    assert patient.mean_s(slice(4)) < 0.75 * without.mean_s(slice(4))


@settings(max_examples=scaled(15))
@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([0.001, 0.004, 0.02]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([65, 128, 512, 1024]),
    st.sampled_from([Product(read, row) for read in (0.001, 0.004) for row in (2e-6, 5e-5, 2e-4)]),
)
def test_the_slowdown_is_bounded_for_all_sizes(
    decoders: int, trainers: int, own_s: float, rows: int, train_rows: int, product: Product
) -> None:
    decoding = [Simulated(rows, own_s)] * decoders
    alone = simulate(CallQueue(), decoding, 5, product).mean_s(slice(decoders))
    clients = decoding + [Simulated(train_rows, 0.002, trains=True)] * trainers
    queue: CallQueue[int] = CallQueue()
    mixed = simulate(queue, clients, 5, product)
    assert mixed.mean_s(slice(decoders)) <= 1.03 * (decoders + trainers) / decoders * alone
    # Each training has at least half of an equal share of the time.
    least = 0.5 * 5 / len(clients) / (product.row_s + product.read_s / 64)
    assert all(queue.rows_served[number] >= least for number in range(decoders, len(clients)))


def test_whole_calls_of_trainings_slow_decoding_down() -> None:
    """The negative control."""
    alone = simulate(CallQueue(), [DECODER] * 6, 20).mean_s(slice(6))
    whole = simulate(WholeCallQueue(), [DECODER] * 6 + [TRAINER] * 2, 60)
    assert whole.mean_s(slice(6)) > 2 * 8 / 6 * alone


def test_a_client_that_infers_after_a_training_has_no_pauses() -> None:
    queue = joined("ab")
    times = itertools.count(0.1, 0.1)

    def pauses(layer: int, backward: bool) -> bool:
        now = next(times)
        serve(queue, "b", now)
        queue.add(Call("a", (layer, backward), 128, now, backward=backward))
        queue.computed(queue.next(now), 0.02, now)
        serve(queue, "b", now)
        rest = queue.next(now)
        if not rest:
            (last,) = queue.next(now + 0.05)
            assert last.first == 64
        return not rest

    # A pass is of two calls.
    assert [pauses(layer, backward=False) for layer in (0, 1)] == [False, False]
    assert [pauses(layer, backward=True) for layer in (1, 0)] == [True, True]
    assert [pauses(layer, backward=False) for layer in (0, 1)] == [True, True], "the forward pass of the next step"
    assert [pauses(layer, backward=False) for layer in (0, 1) * 2][2:] == [False, False]


def test_a_training_uses_the_time_that_slow_clients_leave() -> None:
    remote = Simulated(DECODE_ROWS, 0.2)  # such as clients of another machine
    clients = [remote] * 3 + [TRAINER]
    beside, alone = simulate(CallQueue(), clients, 60), simulate(CallQueue(), [TRAINER], 60)
    assert len(beside.passes[3]) > 0.6 * len(alone.passes[0])
    assert beside.busy > 0.6
    without = simulate(CallQueue(), [remote] * 3, 60).mean_s(slice(3))
    assert beside.mean_s(slice(3)) < 1.15 * without


def test_a_training_alone_is_computed_in_whole_calls() -> None:
    queue = joined(("training", "decoding"))
    queue.add(Call("training", 0, 1000, 0.0))
    assert [call.rows for call in queue.next(0.0)] == [1000]
    queue.add(Call("decoding", 0, 1, 5.0))
    queue.computed(queue.next(5.0), 0.001, 5.0)
    queue.add(Call("training", 0, 1000, 5.5))
    pieces: list[Call[str]] = []
    while len(queue):
        pieces += queue.next(5.5)
        queue.computed(pieces[-1:], 0.02, 5.5)
    assert sum(call.rows for call in pieces) == 1000 and max(call.rows for call in pieces) <= 64
    assert [call.first for call in pieces] == [sum(call.rows for call in pieces[:place]) for place in range(16)]
    queue.add(Call("training", 0, 1000, 9.0))
    assert [call.rows for call in queue.next(9.0)] == [1000], "a client that is idle for long has no part in it"


def test_pieces_of_quick_products_are_larger() -> None:
    queue = joined(("training", "decoding"), max_wait_s=0.01)
    queue.add(Call("training", 0, 1000, 0.0))
    queue.computed(queue.next(0.0), 0.03, 0.0)  # 333 rows in 10 ms
    assert queue.next(0.0) == ()  # nothing came during the product
    queue.add(Call("decoding", 0, 1, 0.0))
    queue.computed(queue.next(0.0), 0.001, 0.0)
    queue.add(Call("training", 0, 1000, 0.0))
    (piece,) = queue.next(0.0)
    assert piece.rows == 250


def test_a_pause_pays_for_the_calls_that_waited() -> None:
    for waiting, pause_s in ((0, 0.0), (1, 0.5 * 2 * 0.02), (2, 2 * 0.02)):
        queue, decoders = joined(), ("b", "c")
        for client in decoders:
            serve(queue, client)
        queue.add(Call("a", 0, 128, 0.0, backward=True))
        (piece,) = queue.next(0.0)
        queue.computed([piece], 0.02, 0.02)
        for client in decoders[:waiting]:
            queue.add(Call(client, 1, 1, 0.02))
        small = [call for _ in range(waiting) for call in queue.next(0.02)]
        assert len(small) == waiting
        if waiting:
            assert queue.next(0.02) == () and queue.wait_s(0.02) == pytest.approx(pause_s)
        assert [call.client for call in queue.next(0.02 + pause_s)] == ["a"]


def test_a_call_of_many_pieces_has_no_pauses_after_ten_seconds() -> None:
    queue = joined("ab")
    serve(queue, "b")
    queue.add(Call("a", 0, 64_000, 0.0, backward=True))
    queue.add(Call("b", 0, 1, 0.0))
    now, computed, later = 0.0, 0, []
    while computed < 64_000:
        batch = queue.next(now)
        if not batch:
            now += queue.wait_s(now) or 0.0
            continue
        took_s = 0.05 if batch[0].client == "a" else 0.0001
        now += took_s
        queue.computed(batch, took_s, now)
        if batch[0].client == "a":
            computed += batch[0].rows
            later += [now] if now > 10.2 else []
        else:
            queue.add(Call("b", 0, 1, now))
    assert computed - 64 * len(later) == pytest.approx(64 * 10 / 0.1, rel=0.05), "each second piece's time is a pause"
    assert later[-1] - later[0] == pytest.approx(0.05 * len(later), rel=0.05)


def test_a_client_that_leaves_within_a_call_is_forgotten() -> None:
    queue = joined("ab")
    serve(queue, "b")
    queue.add(Call("a", 0, 128, 0.0))
    batch = queue.next(0.0)
    queue.leave("a")
    queue.computed(batch, 0.02, 0.02)
    queue.add(Call("b", 0, 1, 0.02))
    assert [call.client for call in queue.next(0.02)] == ["b"] and not len(queue)


def test_the_executor_tells_the_queue_which_calls_are_backward(tmp_path: Path) -> None:
    class Seen(CallQueue[Any]):
        backward: ClassVar[list[bool]] = []

        def add(self, call: Call[Any]) -> None:
            self.backward.append(call.backward)
            super().add(call)

    with serving(tiny("qwen2_vl"), tmp_path, queue=Seen()) as server, connect(server.unix) as base:
        (first, *_) = base.calls.groups[0]
        base.calls.call(Direction.FORWARD, 0, 1, [torch.zeros(1, first.d_in)])
        base.calls.call(Direction.BACKWARD, 0, 1, [torch.zeros(1, first.width)])
    assert Seen.backward == [False, True]


@pytest.fixture
def served(tmp_path: Path) -> Any:
    with serving(tiny("qwen2_vl"), tmp_path, queue=CallQueue(max_wait_s=0.0)) as server:  # pieces of 64 rows
        yield server


@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_results_in_pieces_are_those_of_whole_calls(served: Serving, over: str, direction: Direction) -> None:
    training, decoding = (connect(getattr(served, over)).calls for _ in range(2))
    group = training.groups[0]
    mask = (1 << len(group)) - 1
    given = [group[0].d_in] if direction == Direction.FORWARD else [layer.width for layer in group]
    inputs = [torch.randn(300, width) for width in given]
    whole = [each.clone() for each in training.call(direction, 0, mask, inputs)]
    before = served.server.num_batches, served.server.num_calls
    decoding.call(Direction.FORWARD, 0, mask, [torch.randn(1, group[0].d_in)])
    pieces = training.call(direction, 0, mask, inputs)
    assert served.server.num_batches - before[0] > 2 and served.server.num_calls - before[1] == 2
    expected = served.executor.compute(direction, 0, mask, inputs)
    for each, other, oracle in zip(whole, pieces, expected, strict=True):
        torch.testing.assert_close(each, oracle, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other, oracle, rtol=1e-5, atol=1e-5)
    training.close()
    decoding.close()


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_client_that_ends_within_its_call_stops_no_other(over: str, tmp_path: Path) -> None:
    class Ending(CallQueue[Any]):
        pieces = 0

        def computed(self, batch: Sequence[Call[Any]], took_s: float, now: float) -> None:
            super().computed(batch, took_s, now)
            if batch[0].rows > 1:
                self.pieces += 1
                training.disconnect()

    queue = Ending(max_wait_s=0.0)
    with serving(tiny("qwen2_vl"), tmp_path, queue=queue) as served:
        training, decoding = BaseConnection(getattr(served, over)), connect(getattr(served, over)).calls
        width = training.groups[0][0].d_in
        decoding.call(Direction.FORWARD, 0, 1, [torch.zeros(1, width)])
        training.send(Direction.FORWARD, 0, 1, [torch.zeros(300, width)])
        for _ in range(20):
            decoding.call(Direction.FORWARD, 0, 1, [torch.zeros(1, width)])
        assert 0 < queue.pieces < 5 and not len(queue) and served.server.num_clients == 1
        assert served.server.num_calls == 21, "the call of a lost client is not answered"
        decoding.close()
