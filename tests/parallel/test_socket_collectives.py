"""Communication between ranks over sockets, with a thread per rank: all receive the same, and detect a dead rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.parallel.socket_collectives import _HEAD, Lines, RankGone, RanksApart, connect

T = TypeVar("T")
SOON_S = 5.0  # on a busy machine; the limit for a rank that hangs is two minutes


def on_ranks(size: int, work: Callable[[int, Lines], T], ends: list[dict[int, socket.socket]] | None = None) -> list[T]:
    """The results of all ranks."""
    given = ends or connect(size)
    with ThreadPoolExecutor(size) as threads:

        def rank(number: int) -> T:
            time.sleep(0.003 * (number % 2))  # they arrive at different times
            lines = Lines(number, given[number])
            try:
                return work(number, lines)
            finally:
                lines.close()

        return [future.result(60) for future in [threads.submit(rank, number) for number in range(size)]]


@settings(max_examples=25)
@given(
    size=st.integers(2, 4),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_everybody_has_what_everybody_gave(size: int, shapes: list[list[int]], dtype: torch.dtype) -> None:
    def given_by(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in shapes]

    found = on_ranks(size, lambda rank, lines: [lines.exchange(tensor, "test") for tensor in given_by(rank)])
    for number in range(len(shapes)):
        wanted = torch.stack([given_by(rank)[number] for rank in range(size)])
        for own in found:
            assert own[number].dtype == dtype and torch.equal(own[number], wanted)


def test_a_large_tensor_and_ranks_of_unlike_speed() -> None:
    """Much more than a socket's buffer holds, and one rank is late at every call."""
    size, count = 3, 2**20

    def work(rank: int, lines: Lines) -> list[torch.Tensor]:
        found = []
        for turn in range(3):
            time.sleep(0.02 * rank)
            found.append(lines.exchange(torch.full((count,), float(10 * turn + rank)), "test"))
        return found

    for own in on_ranks(size, work):
        for turn in range(3):
            assert own[turn][:, [0, -1]].tolist() == [[10.0 * turn + rank] * 2 for rank in range(size)]


def test_rank_0_s_words_arrive_whole_and_in_order_between_exchanges() -> None:
    words = [b"", b"x", bytes(range(256)) * 5000, b"last"]

    def work(rank: int, lines: Lines) -> list[bytes]:
        heard = []
        for word in words:
            if rank == 0:
                lines.tell(word)
            else:
                heard.append(lines.hear())
            assert lines.exchange(torch.tensor([rank]), "test").flatten().tolist() == [0, 1, 2]
        return heard

    nothing, *others = on_ranks(3, work)
    assert nothing == [] and others == [words, words]


@pytest.mark.parametrize("waits_for", ["exchange", "hear"])
def test_who_waits_for_a_rank_that_goes_is_told_at_once(waits_for: str) -> None:
    def work(rank: int, lines: Lines) -> float:
        if rank == 0:
            time.sleep(0.1)
            return 0.0
        started = time.monotonic()
        with pytest.raises(RankGone, match=r"rank [01] is gone"):
            lines.exchange(torch.zeros(4), "test") if waits_for == "exchange" else lines.hear()
        return time.monotonic() - started

    assert max(on_ranks(3, work)) < SOON_S


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_before_it_is_there_is_not_waited_for(gone: int) -> None:
    ends = connect(2)
    for end in ends[gone].values():
        end.close()
    started = time.monotonic()
    with pytest.raises(RankGone, match=f"rank {gone} is gone"):
        Lines(1 - gone, ends[1 - gone])
    assert time.monotonic() - started < SOON_S


def test_one_that_lives_and_hangs_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.parallel.socket_collectives._HANG_S", 1)

    def work(rank: int, lines: Lines) -> list[int]:
        if rank == 0:
            time.sleep(1.5)
            return []
        with pytest.raises(RanksApart, match="rank 1 received nothing from rank 0"):
            lines.exchange(torch.zeros(4), "test")
        return [1]

    assert on_ranks(2, work) == [[], [1]]


def test_one_that_loads_is_waited_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all ranks are connected, and in patient calls."""
    monkeypatch.setattr("vlora.parallel.socket_collectives._HANG_S", 1)
    ends = connect(2)

    def rank(number: int) -> list[int]:
        time.sleep(1.3 * (number == 1))
        lines = Lines(number, ends[number])
        time.sleep(1.3 * (number == 0))
        found: list[int] = lines.exchange(torch.tensor(number), "test", patient=True).tolist()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[0, 1], [0, 1]]


# -- ranks out of sync ------------------------------------------------------------------------------------------------


def short(rank: int, lines: Lines) -> None:
    lines.exchange(torch.zeros(4 + 4 * rank), "test")


def other_purpose(rank: int, lines: Lines) -> None:
    lines.exchange(torch.zeros(4), ("sum base", "sum slora")[rank])


def one_more(rank: int, lines: Lines) -> None:
    for _ in range(1 + rank):
        lines.exchange(torch.zeros(4), "test")
    if rank == 0:
        lines.tell(b"next")
        lines.exchange(torch.zeros(4), "test")


def one_left_out(rank: int, lines: Lines) -> None:
    """Sent twice, with equal size and purpose: only the number differs."""
    lines._number += rank
    lines.exchange(torch.zeros(4), "test")


def told_instead(rank: int, lines: Lines) -> None:
    lines.tell(b"word") if rank == 0 else lines.exchange(torch.zeros(4), "test")
    if rank == 0:
        lines.exchange(torch.zeros(4), "test")


def heard_instead(rank: int, lines: Lines) -> None:
    lines.exchange(torch.zeros(4), "test") if rank == 0 else lines.hear()


@pytest.mark.parametrize("work", [short, other_purpose, one_more, one_left_out, told_instead, heard_instead])
def test_ranks_that_come_apart_are_told_at_once_and_never_take_one_thing_for_another(
    work: Callable[[int, Lines], None],
) -> None:
    def rank(number: int, lines: Lines) -> str:
        with pytest.raises(RanksApart) as raised:
            work(number, lines)
        return str(raised.value)

    started = time.monotonic()
    said = on_ranks(2, rank)
    assert time.monotonic() - started < SOON_S
    assert any("ranks out of sync: rank" in words for words in said), said
    assert all("out of sync" in words or "is gone" in words for words in said), said


def test_it_is_said_what_came_and_what_was_expected() -> None:
    def work(rank: int, lines: Lines) -> str:
        with pytest.raises(RanksApart) as raised:
            short(rank, lines)
        time.sleep(0.2)  # until the other one has read
        return str(raised.value)

    assert on_ranks(2, work)[0] == (
        "ranks out of sync: rank 1 sent message 2 (test, 32 bytes), but rank 0 expects message 2 (test, 16 bytes)"
    )


# -- buffers ----------------------------------------------------------------------------------------------------------


class Stingy(socket.socket):
    """As of a system that limits sockets to a small buffer."""

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:  # type: ignore[override]
        super().setsockopt(level, option, 4096 if option == socket.SO_SNDBUF else value)


@pytest.mark.parametrize("poor", [{0}, {0, 1, 2}])
def test_pieces_are_as_small_as_the_system_s_buffers_ask_for(poor: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank or all: they agree on a size. Larger pieces would deadlock."""
    monkeypatch.setattr("vlora.parallel.socket_collectives._HANG_S", 3)
    ends = connect(3)
    for rank in poor:
        ends[rank] = {other: Stingy(fileno=end.detach()) for other, end in ends[rank].items()}
        for end in ends[rank].values():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    count = 2**17

    def work(rank: int, lines: Lines) -> list[float]:
        return lines.exchange(torch.full((count,), float(rank)), "test")[:, [0, -1]].flatten().tolist()

    assert on_ranks(3, work, ends) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_a_line_s_buffer_holds_two_pieces_that_nobody_reads() -> None:
    """And their heads, as an exchange requires. Otherwise the send would block here."""
    ends = connect(2)
    with ThreadPoolExecutor(2) as threads:
        lines = list(threads.map(lambda rank: Lines(rank, ends[rank]), range(2)))
    ends[0][1].setblocking(False)
    for _ in range(2):
        piece = bytes(lines[0]._piece)
        assert ends[0][1].sendmsg((bytes(_HEAD.size), piece)) == _HEAD.size + len(piece)
    for each in lines:
        each.close()
