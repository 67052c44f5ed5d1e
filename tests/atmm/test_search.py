"""The offline search: timed candidates, resumption, and the tables."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atmm import STRATEGIES
from atmm.batch_stats import BatchStats
from atmm.cpu.lanes import serves
from atmm.dispatch import rule
from atmm.operator import add_delta
from atmm.segments import SegmentPlan
from atmm.triton.tiling import Tiling, all_usual, fits, sensible, space, usual
from atmm.tuning.buckets import Bucket, Evenness
from atmm.tuning.cold_cache import DeviceCaches, factors_of, read_by
from atmm.tuning.search import ADAPTERS, RANKS, TOKENS, Case, Shape, candidates, cases, error, measure, read, search

SMALL = [Shape(48, (40, 16, 16)), Shape(40, (48,))]


def some(count: int) -> list[Case]:
    return [case for case in cases(SMALL, ["float32", "bfloat16"]) if case.num_tokens <= 32][:count]


def stats_of(case: Case) -> BatchStats:
    packed = case.group("cpu").packed
    assert packed is not None
    return BatchStats(case.plan(), packed.layout)


def test_the_grid_covers_every_size_and_is_the_same_every_time() -> None:
    grid = cases(SMALL, ["float32"])
    assert grid == cases(SMALL, ["float32"])
    assert {case.num_tokens for case in grid} == set(TOKENS)
    assert {case.num_adapters for case in grid} == set(ADAPTERS)
    assert {case.rank for case in grid} == set(RANKS)
    assert len(set(grid)) == len(grid)


def test_a_bucket_has_a_case_that_falls_into_it() -> None:
    for case in some(60):
        bucket = Bucket.of(stats_of(case))
        assert Bucket.of(stats_of(Case.of(bucket))) == bucket


def test_ragged_segments_halve() -> None:
    lengths = [lane.stop - lane.start for lane in Case(SMALL[0], 8, "float32", 4, 64, False).plan().lanes]
    assert sum(lengths) == 64 and min(lengths) >= 1
    assert all(1.5 * after < before for before, after in itertools.pairwise(lengths))


def test_every_candidate_is_timed_and_the_rule_among_them() -> None:
    for case in some(6):
        stats = stats_of(case)
        finding = measure(case, case.group("cpu"), "cpu")
        assert finding.bucket == Bucket.of(stats)
        assert finding.ruled in finding.seconds and finding.best in finding.seconds
        assert set(finding.seconds) <= set(STRATEGIES) and all(value > 0 for value in finding.seconds.values())


def test_clearly_slower_candidates_are_not_timed() -> None:
    case = Case(Shape(896, (896,)), 64, "float32", 16, 2048, True)
    names = candidates(stats_of(case), transposed=False)
    # "stacked" has 16 times the arithmetic of the others, "compiled" processes one token at a time.
    assert "stacked" not in names and "compiled" not in names
    assert "batched" in names and rule(stats_of(case)) in names


def test_evicting_caches_does_not_change_tensors() -> None:
    group = Case(SMALL[0], 8, "float32", 2, 8, True).group("cpu")
    factors = factors_of(group)
    before = [tensor.clone() for tensor in factors]
    DeviceCaches("cpu", torch.float32).evict(factors)
    assert len(factors) == 2 * 2 * 3 + 1 + 3 + len(group.packed.bs if group.packed else ())
    assert all(torch.equal(now, then) for now, then in zip(factors, before, strict=True))


def test_outputs_depend_on_the_factors_that_a_strategy_reads() -> None:
    case = Case(SMALL[0], 8, "float32", 2, 24, False)
    for name in ("loop", "divided", "batched", "stacked", "gathered", "compiled"):
        group = case.group("cpu")
        x, before = case.input("cpu")
        _, after = case.input("cpu")
        add_delta(before[0], x, group.sites[0], case.plan(name))
        read = {id(tensor) for tensor in read_by(name, group)}
        for tensor in factors_of(group):
            if id(tensor) not in read:
                tensor.fill_(float("nan"))
        add_delta(after[0], x, group.sites[0], case.plan(name))
        assert torch.equal(before[0], after[0])
        for tensor in read_by(name, group):
            tensor.fill_(float("nan"))
        add_delta(after[0], x, group.sites[0], case.plan(name))
        assert after[0].isnan().any()


def test_divided_is_timed_where_some_lanes_are_short_and_some_long() -> None:
    for case, expected in (
        (Case(SMALL[0], 8, "float32", 4, 64, False), serves(torch.device("cpu"), torch.float32)),
        (Case(SMALL[0], 8, "float32", 4, 64, True), False),
        (Case(SMALL[0], 8, "float32", 4, 8, False), False),
    ):
        assert ("divided" in candidates(stats_of(case), transposed=False)) == expected


def test_an_interrupted_search_resumes(tmp_path: Path) -> None:
    journal, todo = tmp_path / "found.partial", some(5)
    assert list(search(todo, "cpu", journal, seconds=0.0)) == []
    first = list(search(todo[:2], "cpu", journal, seconds=60.0))
    with journal.open("a") as file:
        file.write('{"bucket": [1, 2')  # the machine failed during the write
    assert read(journal) == first
    rest = list(search(todo, "cpu", journal, seconds=60.0))
    assert rest[:2] == [None, None] and len(rest) == 5
    known = read(journal)
    assert len({finding.bucket for finding in known}) == len(known)


def test_a_wrong_strategy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SMALL[0], 8, "float32", 2, 8, True)
    assert error(case, "batched", "cpu") < 1e-5

    class Lazy:
        adds_transposed = True
        add_all = begin = refill = None

        def __init__(self, plan: SegmentPlan, stats: BatchStats) -> None: ...
        def __call__(self, *_: object) -> None: ...

    monkeypatch.setitem(STRATEGIES, "batched", Lazy)
    assert error(case, "batched", "cpu") > 0.1


@given(st.sampled_from(list(space(2))))
def test_a_tiling_is_found_again_by_its_name(tiling: Tiling) -> None:
    assert Tiling.named(tiling.name) == tiling
    assert all(size & (size - 1) == 0 for size in tiling[:4])
    assert min(tiling[:3]) >= 16


@pytest.mark.parametrize("name", ("tiled m16", "tiled", "tiled m16 n128 k128 s4 p3 w8", "loop"))
def test_an_invalid_tiling_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a tiling"):
        Tiling.named(name)


def test_tilings_too_large_are_left_out() -> None:
    assert not fits(Tiling(128, 256, 256, 1, 4), 2)
    assert not any(tiling.num_stages * tiling.block_k * (tiling.block_m + 64) * 4 > 166_912 for tiling in space(4))
    decode = list(sensible(2, 3584, longest=1, num_tokens=16))
    assert {tiling.block_m for tiling in decode} == {16} and {tiling.split_k for tiling in decode} == {0, 1, 2, 4, 8}
    prefill = list(sensible(2, 3584, longest=4096, num_tokens=8192))
    assert {tiling.split_k for tiling in prefill} == {1}
    assert set(decode) < set(space(2))


@pytest.mark.parametrize("itemsize", (2, 4))
def test_default_tilings_are_in_the_search_space(itemsize: int) -> None:
    known = set(space(itemsize))
    assert set(all_usual(itemsize)) <= known
    for d_in, longest, programs in itertools.product((16, 896, 18944), (1, 17, 33, 2048), (1, 4, 100, 5000)):
        assert usual(itemsize, d_in, longest, programs) in set(all_usual(itemsize))


def test_buckets_distinguish_even_from_ragged() -> None:
    assert Bucket.of(stats_of(Case(SMALL[1], 8, "float32", 4, 16, True))).evenness == Evenness.EVEN
    assert Bucket.of(stats_of(Case(SMALL[1], 8, "float32", 4, 16, False))).evenness == Evenness.RAGGED
    assert torch.float32 == Bucket.of(stats_of(Case(SMALL[1], 8, "float32", 1, 16, True))).dtype
