"""Communication between ranks over sockets, with a thread per rank: all receive the same, and detect a dead rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.parallel.process_group import CollectiveFailed, RankDead, SocketCollectives, connect

T = TypeVar("T")


def on_ranks(
    size: int, work: Callable[[int, SocketCollectives], T], ends: list[dict[int, socket.socket]] | None = None
) -> list[T]:
    """The results of all ranks."""
    given = ends or connect(size)
    with ThreadPoolExecutor(size) as threads:

        def rank(number: int) -> T:
            time.sleep(0.003 * (number % 2))  # they arrive at different times
            collectives = SocketCollectives(number, given[number])
            try:
                return work(number, collectives)
            finally:
                collectives.close()

        return [future.result(60) for future in [threads.submit(rank, number) for number in range(size)]]


@settings(max_examples=scaled(25))
@given(
    size=st.integers(2, 4),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_every_rank_receives_every_rank_s_tensor(size: int, shapes: list[list[int]], dtype: torch.dtype) -> None:
    def given_by(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in shapes]

    found = on_ranks(
        size, lambda rank, collectives: [collectives.exchange(tensor, "test") for tensor in given_by(rank)]
    )
    for number in range(len(shapes)):
        expected = torch.stack([given_by(rank)[number] for rank in range(size)])
        for own in found:
            assert own[number].dtype == dtype and torch.equal(own[number], expected)


def test_large_tensors_and_ranks_of_different_speed() -> None:
    """Much more than a socket's buffer holds, and one rank is late at every call."""
    size, count = 3, 2**20

    def work(rank: int, collectives: SocketCollectives) -> list[torch.Tensor]:
        found = []
        for turn in range(3):
            time.sleep(0.02 * rank)
            found.append(collectives.exchange(torch.full((count,), float(10 * turn + rank)), "test"))
        return found

    for own in on_ranks(size, work):
        for turn in range(3):
            assert own[turn][:, [0, -1]].tolist() == [[10.0 * turn + rank] * 2 for rank in range(size)]


def test_broadcasts_arrive_whole_and_in_order_between_exchanges() -> None:
    broadcasts = [b"", b"x", bytes(range(256)) * 5000, b"last"]

    def work(rank: int, collectives: SocketCollectives) -> list[bytes]:
        received = []
        for message in broadcasts:
            if rank == 0:
                collectives.broadcast(message)
            else:
                received.append(collectives.receive())
            assert collectives.exchange(torch.tensor([rank]), "test").flatten().tolist() == [0, 1, 2]
        return received

    nothing, *others = on_ranks(3, work)
    assert nothing == [] and others == [broadcasts, broadcasts]


# A rank that hangs fails after two minutes with another error, so these errors show that an end is noticed before.


@pytest.mark.parametrize("waits_for", ["exchange", "receive"])
def test_the_end_of_a_rank_ends_waits_for_it(waits_for: str) -> None:
    def work(rank: int, collectives: SocketCollectives) -> None:
        if rank == 0:
            time.sleep(0.1)
            return
        with pytest.raises(RankDead, match=r"rank [01] is gone"):
            collectives.exchange(torch.zeros(4), "test") if waits_for == "exchange" else collectives.receive()

    on_ranks(3, work)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_before_connecting_is_detected(gone: int) -> None:
    ends = connect(2)
    for end in ends[gone].values():
        end.close()
    with pytest.raises(RankDead, match=f"rank {gone} is gone"):
        SocketCollectives(1 - gone, ends[1 - gone])


@pytest.mark.slow
def test_a_live_rank_that_hangs_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.parallel.process_group.HANG_S", 1)

    def work(rank: int, collectives: SocketCollectives) -> list[int]:
        if rank == 0:
            time.sleep(1.5)
            return []
        with pytest.raises(CollectiveFailed, match="rank 1 received nothing from rank 0"):
            collectives.exchange(torch.zeros(4), "test")
        return [1]

    assert on_ranks(2, work) == [[], [1]]


@pytest.mark.slow
def test_a_loading_rank_is_waited_for_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all ranks are connected, and in calls without a timeout."""
    monkeypatch.setattr("vlora.parallel.process_group.HANG_S", 1)
    ends = connect(2)

    def rank(number: int) -> list[int]:
        time.sleep(1.3 * (number == 1))
        collectives = SocketCollectives(number, ends[number])
        time.sleep(1.3 * (number == 0))
        found: list[int] = collectives.exchange(torch.tensor(number), "test", timeout=False).tolist()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[0, 1], [0, 1]]


# -- ranks out of sync ------------------------------------------------------------------------------------------------


FOUR = torch.zeros(4)


def one_more(rank: int, own: SocketCollectives) -> None:
    for _ in range(1 + rank):
        own.exchange(FOUR, "test")
    if rank == 0:
        own.broadcast(b"next")
        own.exchange(FOUR, "test")


def broadcast_instead(rank: int, own: SocketCollectives) -> None:
    if rank == 0:
        own.broadcast(b"word")
    own.exchange(FOUR, "test")


OUT_OF_SYNC: dict[str, Callable[[int, SocketCollectives], Any]] = {
    "short": lambda rank, own: own.exchange(torch.zeros(4 + 4 * rank), "test"),
    "other purpose": lambda rank, own: own.exchange(FOUR, ("sum base", "sum slora")[rank]),
    "one more": one_more,
    "broadcast instead": broadcast_instead,
    "receive instead": lambda rank, own: own.exchange(FOUR, "test") if rank == 0 else own.receive(),
}


@pytest.mark.parametrize("work", OUT_OF_SYNC.values(), ids=OUT_OF_SYNC)
def test_ranks_out_of_sync_fail(work: Callable[[int, SocketCollectives], None]) -> None:
    def rank(number: int, collectives: SocketCollectives) -> str:
        with pytest.raises(CollectiveFailed) as raised:
            work(number, collectives)
        return str(raised.value)

    errors = on_ranks(2, rank)
    assert any("ranks out of sync: rank" in error for error in errors), errors
    assert all("out of sync" in error or "is gone" in error for error in errors), errors


class Repeating(socket.socket):
    """Sends every message twice, from some time on."""

    repeats = False

    def sendmsg(self, buffers: Any, *others: Any) -> int:
        if self.repeats:
            super().sendmsg(buffers)
        return super().sendmsg(buffers, *others)


def test_a_message_that_arrives_twice_is_recognized_by_its_number() -> None:
    """Its size and purpose are those of the next message."""
    ends = connect(2)
    ends[1][0] = repeating = Repeating(fileno=ends[1][0].detach())

    def work(rank: int, collectives: SocketCollectives) -> str | None:
        if rank == 1:
            repeating.repeats = True
        collectives.exchange(torch.zeros(4), "test")
        try:
            collectives.exchange(torch.zeros(4), "test")
        except CollectiveFailed as error:
            return str(error)
        return None

    error = on_ranks(2, work, ends)[0]
    assert error is not None and "sent message 2 (test, 16 bytes), but rank 0 expects message 3" in error


# -- buffers ----------------------------------------------------------------------------------------------------------


class Stingy(socket.socket):
    """As of a system that limits sockets to a small buffer."""

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:  # type: ignore[override]
        super().setsockopt(level, option, 4096 if option == socket.SO_SNDBUF else value)


@pytest.mark.parametrize("poor", [{0}, {0, 1, 2}])
def test_pieces_fit_into_small_system_buffers(poor: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank or all: they agree on a size. Larger pieces would deadlock."""
    monkeypatch.setattr("vlora.parallel.process_group.HANG_S", 3)
    ends = connect(3)
    for rank in poor:
        ends[rank] = {other: Stingy(fileno=end.detach()) for other, end in ends[rank].items()}
        for end in ends[rank].values():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    count = 2**14

    def work(rank: int, collectives: SocketCollectives) -> list[float]:
        return collectives.exchange(torch.full((count,), float(rank)), "test")[:, [0, -1]].flatten().tolist()

    assert on_ranks(3, work, ends) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3
