"""What ranks say to each other over sockets, each rank a thread: all have the same, and are told of one that goes."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.engine.private_folder import private_folder
from vlora.parallel.lines import Lines

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[int, Lines], T]) -> list[T]:
    """What each of them returns."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def rank(number: int) -> T:
            time.sleep(0.003 * (number % 2))  # they do not come at once
            lines = Lines(folder, number, size)
            try:
                return work(number, lines)
            finally:
                lines.close()

        return [future.result(60) for future in [threads.submit(rank, number) for number in range(size)]]


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(2, 4),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_everybody_has_what_everybody_gave(size: int, shapes: list[list[int]], dtype: torch.dtype) -> None:
    def given_by(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in shapes]

    found = on_ranks(size, lambda rank, lines: [lines.exchange(tensor) for tensor in given_by(rank)])
    for number in range(len(shapes)):
        wanted = torch.stack([given_by(rank)[number] for rank in range(size)])
        for own in found:
            assert own[number].dtype == dtype and torch.equal(own[number], wanted)


def test_a_large_tensor_and_ranks_of_unlike_speed() -> None:
    """Far more than a socket's buffer holds, and one rank comes late to everything."""
    size, count = 3, 2**20

    def work(rank: int, lines: Lines) -> list[torch.Tensor]:
        found = []
        for turn in range(3):
            time.sleep(0.02 * rank)
            found.append(lines.exchange(torch.full((count,), float(10 * turn + rank))))
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
            assert lines.exchange(torch.tensor([rank])).flatten().tolist() == [0, 1, 2]
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
        with pytest.raises(RuntimeError, match=r"rank [01]"):
            lines.exchange(torch.zeros(4)) if waits_for == "exchange" else lines.hear()
        return time.monotonic() - started

    assert max(on_ranks(3, work)) < 5.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_nobody_else_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr("vlora.parallel.lines._HANG_S", 0.05)
    with pytest.raises(RuntimeError, match=f"rank {rank} does not reach the others"):
        Lines(str(tmp_path), rank, 2)


def test_one_that_lives_and_hangs_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.parallel.lines._HANG_S", 1)

    def work(rank: int, lines: Lines) -> list[int]:
        if rank == 0:
            time.sleep(1.5)
            return []
        with pytest.raises(RuntimeError, match="rank 1 hears nothing of rank 0"):
            lines.exchange(torch.zeros(4))
        return [1]

    assert on_ranks(2, work) == [[], [1]]

    # Unless it was told that this may take its time.
    def late(rank: int, lines: Lines) -> list[int]:
        time.sleep(1.5 * (rank == 0))
        return lines.exchange(torch.tensor(rank), patient=True).tolist()

    assert on_ranks(2, late) == [[0, 1], [0, 1]]


def test_where_temporary_files_lie_deep_a_folder_for_sockets_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder("vlora-", "rank-16")
    try:
        assert deep not in folder.parents and folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as line:
            line.bind(str(folder / "rank-16"))
    finally:
        shutil.rmtree(folder)
    assert not list(deep.iterdir())
