"""Decoding beside training on one executor: the queue under a fake clock, and pieces of large calls on a real one."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.split.running import Serving, serving, tiny
from vlora.bench.split.base_process import WholeCallQueue
from vlora.split.batching import Call, CallQueue
from vlora.split.connection import BaseConnection
from vlora.split.frames import Direction

LAYERS = 12
DECODE_ROWS, TRAIN_ROWS = 2, 128


class Simulated(NamedTuple):
    """A client in a closed loop over layers.

    Attributes:
        rows: Of its calls.
        own_s: Its own work between an answer and its next call.
        trains: Each second pass is backward, and so is the first: before that, the queue takes it for inference.
        prompt: Rows of the calls of its first pass, and of each 17th one.
    """

    rows: int
    own_s: float
    trains: bool = False
    prompt: int = 0

    def call(self, number: int, done: int, now: float) -> Call[int]:
        """Its call after as many as are done."""
        at, layer = divmod(done, LAYERS)
        backward = self.trains and at % 2 == 0
        return Call(number, (backward, layer), self.rows_of(done), now, backward=backward)

    def rows_of(self, done: int) -> int:
        return self.prompt if self.prompt and done // LAYERS % 17 == 0 else self.rows


DECODER, TRAINER = Simulated(DECODE_ROWS, 0.001), Simulated(TRAIN_ROWS, 0.002, trains=True)


class Product(NamedTuple):
    """Seconds of a product: to read the weights of a layer, and of arithmetic for a row."""

    read_s: float = 0.004
    row_s: float = 0.0002

    def took_s(self, rows: int) -> float:
        return self.read_s + self.row_s * rows


SLOW = Product()


class Simulation(NamedTuple):
    """Seconds of a pass through all layers, by client, and the executor's share of the time at work."""

    passes: Sequence[Sequence[float]]
    busy: float

    def mean_s(self, clients: slice) -> float:
        return statistics.fmean(took for each in self.passes[clients] for took in each[3:])

    def rows_served(self, clients: Sequence[Simulated]) -> int:
        return sum(client.rows * len(each) for client, each in zip(clients, self.passes, strict=True))


def simulate(
    queue: CallQueue[int], clients: Sequence[Simulated], seconds: float, product: Product = SLOW
) -> Simulation:
    """Let clients start one after the other, and stop after `seconds`."""
    arrivals = [(0.003 * number, number) for number in range(len(clients))]
    done, begun = [0] * len(clients), [0.0] * len(clients)
    passes: list[list[float]] = [[] for _ in clients]
    computed = [0] * len(clients)
    now = busy = 0.0
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
        took = product.took_s(sum(call.rows for call in batch))
        now, busy = now + took, busy + took
        queue.computed(batch, took, now)
        for call in batch:
            computed[call.client] += call.rows
            if computed[call.client] == clients[call.client].rows_of(done[call.client]):
                computed[call.client] = 0
                done[call.client] += 1
                heapq.heappush(arrivals, (now + clients[call.client].own_s, call.client))
    return Simulation(passes, busy / now)


def test_trainings_slow_decoding_by_at_most_their_share_of_the_clients() -> None:
    eight = simulate(CallQueue(), [DECODER] * 8, 20).mean_s(slice(8))
    six = simulate(CallQueue(), [DECODER] * 6, 20).mean_s(slice(6))
    clients = [DECODER] * 6 + [TRAINER] * 2
    mixed = simulate(CallQueue(), clients, 60)
    assert mixed.mean_s(slice(6)) <= 8 / 6 * six
    whole = simulate(WholeCallQueue(), clients, 60)
    assert whole.mean_s(slice(6)) > 2 * 8 / 6 * six, "whole calls do not slow decoding: the test shows nothing"
    # The trainings get on meanwhile, and more rows are served than by eight decoders.
    alone = simulate(CallQueue(), [TRAINER], 20).mean_s(slice(1))
    assert mixed.mean_s(slice(6, 8)) < 1.5 * 8 * alone
    assert eight > six
    decoders = simulate(CallQueue(), [DECODER] * 8, 60).rows_served([DECODER] * 8)
    assert mixed.rows_served(clients) > 1.05 * decoders


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


def test_prefills_have_no_pauses_beside_decoding_and_training() -> None:
    clients = [DECODER._replace(prompt=TRAIN_ROWS), *[DECODER] * 5, TRAINER, TRAINER]
    first_token_s = statistics.fmean(simulate(CallQueue(), clients, 60).passes[0][17::17])
    # Alone it takes 12 times two pieces; with pauses for an equal share of the time, 8 times as long.
    assert first_token_s < 4 * LAYERS * 2 * SLOW.took_s(64)


def test_a_client_that_infers_after_a_training_has_no_pauses() -> None:
    queue: CallQueue[str] = CallQueue()
    for client in "ab":
        queue.join(client)
    times = itertools.count(0.1, 0.1)

    def pauses(layer: int, backward: bool) -> bool:
        now = next(times)
        queue.add(Call("b", 0, 1, now))
        queue.computed(queue.next(now), 0.001, now)
        queue.add(Call("a", (layer, backward), 128, now, backward=backward))
        queue.computed(queue.next(now), 0.02, now)
        queue.add(Call("b", 0, 1, now))
        queue.computed(queue.next(now), 0.001, now)
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
    queue: CallQueue[str] = CallQueue()
    for client in ("training", "decoding"):
        queue.join(client)
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
    queue: CallQueue[str] = CallQueue(max_wait_s=0.01)
    for client in ("training", "decoding"):
        queue.join(client)
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
        queue: CallQueue[str] = CallQueue()
        decoders = ("b", "c")
        for client in ("a", *decoders):
            queue.join(client)
        for client in decoders:
            queue.add(Call(client, 0, 1, 0.0))
            queue.computed(queue.next(0.0), 0.001, 0.0)
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
    queue: CallQueue[str] = CallQueue()
    for client in "ab":
        queue.join(client)
    queue.add(Call("b", 0, 1, 0.0))
    queue.computed(queue.next(0.0), 0.001, 0.0)
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
    queue: CallQueue[str] = CallQueue()
    for client in "ab":
        queue.join(client)
    queue.add(Call("b", 0, 1, 0.0))
    queue.computed(queue.next(0.0), 0.001, 0.0)
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

    with serving(tiny("qwen2_vl"), tmp_path, queue=Seen()) as server:
        connection = BaseConnection(server.unix)
        (first, *_) = connection.groups[0]
        connection.call(Direction.FORWARD, 0, 1, [torch.zeros(1, first.d_in)])
        connection.call(Direction.BACKWARD, 0, 1, [torch.zeros(1, first.width)])
        connection.close()
    assert Seen.backward == [False, True]


@pytest.fixture
def served(tmp_path: Path) -> Any:
    with serving(tiny("qwen2_vl"), tmp_path, queue=CallQueue(max_wait_s=0.0)) as server:  # pieces of 64 rows
        yield server


@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_results_in_pieces_are_those_of_whole_calls(served: Serving, over: str, direction: Direction) -> None:
    training, decoding = (BaseConnection(getattr(served, over)) for _ in range(2))
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
        training, decoding = (BaseConnection(getattr(served, over)) for _ in range(2))
        width = training.groups[0][0].d_in
        decoding.call(Direction.FORWARD, 0, 1, [torch.zeros(1, width)])
        training.send(Direction.FORWARD, 0, 1, [torch.zeros(300, width)])
        for _ in range(20):
            decoding.call(Direction.FORWARD, 0, 1, [torch.zeros(1, width)])
        assert 0 < queue.pieces < 5 and not len(queue) and served.server.num_clients == 1
        assert served.server.num_calls == 21, "the call of a lost client is not answered"
        decoding.close()
