"""Measurements that choose: the offline search for strategies, its races and GPU kernels, and matrix products."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atmm import STRATEGIES, matmul, processor, reference
from atmm.cpu.lanes import serves
from atmm.cpu.products import Weights
from atmm.dispatch import rule
from atmm.layers import Layout, SiteGroup
from atmm.operator import add_delta
from atmm.places import PackedPlaces
from atmm.segments import BatchStats, SegmentPlan
from atmm.triton import tiling
from atmm.triton.tiling import Tiling
from atmm.tuning import matmul_choice, search
from atmm.tuning.matmul_choice import Contention
from atmm.tuning.search import Case, Shape, candidates, cases, compile_kernels, kernel_key, measure
from atmm.tuning.tables import Bucket, Evenness
from atmm.tuning.timing import DeviceCaches, factors_of, race, read_by

SMALL = [Shape(48, (40, 16, 16)), Shape(40, (48,))]
CPU = torch.device("cpu")


def some(count: int) -> list[Case]:
    return [case for case in cases(SMALL, ["float32", "bfloat16"]) if case.num_tokens <= 32][:count]


@functools.cache
def group_of(case: Case) -> SiteGroup:
    return case.group("cpu")


def stats_of(case: Case) -> BatchStats:
    packed = group_of(case).packed
    assert packed is not None
    return BatchStats(case.plan(), packed.layout)


# -- the search for strategies ----------------------------------------------------------------------------------------


def test_the_grid_covers_every_size_and_is_the_same_every_time() -> None:
    grid = cases(SMALL, ["float32"])
    assert grid == cases(SMALL, ["float32"]) and len(set(grid)) == len(grid)
    found = [{getattr(case, name) for case in grid} for name in ("num_tokens", "num_adapters", "rank")]
    assert found == [set(search.TOKENS), set(search.ADAPTERS), set(search.RANKS)]
    for case in some(60):
        bucket = Bucket.of(stats_of(case))
        assert Bucket.of(stats_of(Case.of(bucket))) == bucket, "a bucket has a case that falls into it"


@pytest.mark.parametrize(
    ("adapters", "even", "evenness"),
    ((4, True, Evenness.EVEN), (4, False, Evenness.RAGGED), (1, True, Evenness.SINGLE)),
)
def test_ragged_segments_halve_and_fall_into_other_buckets(adapters: int, even: bool, evenness: Evenness) -> None:
    case = Case(SMALL[0], 8, "float32", adapters, 64, even)
    assert Bucket.of(stats_of(case))[6:8] == (evenness, torch.float32)
    lengths = [lane.stop - lane.start for lane in case.plan().lanes]
    assert sum(lengths) == 64 and min(lengths) >= 1
    assert even or all(1.5 * after < before for before, after in itertools.pairwise(lengths))


def test_every_candidate_is_timed_and_the_rule_among_them() -> None:
    for case in some(6):
        stats = stats_of(case)
        finding = measure(case, case.group("cpu"), "cpu")
        assert finding.bucket == Bucket.of(stats)
        assert finding.ruled in finding.seconds and finding.best in finding.seconds
        assert set(finding.seconds) <= set(STRATEGIES) and all(value > 0 for value in finding.seconds.values())


def test_clearly_slower_candidates_are_not_timed() -> None:
    stats = stats_of(Case(Shape(896, (896,)), 64, "float32", 16, 2048, True))
    names = candidates(stats)
    # "stacked" has 16 times the arithmetic of the others, "compiled" processes one token at a time.
    assert "stacked" not in names and "compiled" not in names
    assert "batched" in names and rule(stats) in names
    for num_tokens, even in ((64, False), (64, True), (8, False)):
        divided = serves(CPU, torch.float32) and (num_tokens, even) == (64, False)  # some lanes are short, others long
        case = Case(SMALL[0], 8, "float32", 4, num_tokens, even)
        assert ("divided" in candidates(stats_of(case))) == divided


def test_a_gpu_is_searched_for_strategies_that_requests_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    stats = stats_of(Case(SMALL[0], 8, "float32", 2, 8, True))
    layout, spans = stats.layout, tuple(tuple(site.values()) for site in stats.layout.spans)
    stats.layout = Layout(layout.keys, spans, layout.d_in, layout.d_outs, layout.dtype, torch.device("cuda"))
    names = candidates(stats)
    assert rule(stats) in names and len(names) > 2 and all(name.startswith("tiled") for name in names)
    tilings = [Tiling.named(name) for name in names if name != "tiled"]
    assert all(tiling.fits(each, 4, tiling.LEAST_SHARED) for each in tilings)


def test_evicting_caches_does_not_change_tensors() -> None:
    group = Case(SMALL[0], 8, "float32", 2, 8, True).group("cpu")
    factors = factors_of(group)
    before = [tensor.clone() for tensor in factors]
    DeviceCaches("cpu", torch.float32).evict(factors)
    assert len(factors) == 2 * 2 * 3 + 1 + 3
    assert all(torch.equal(now, then) for now, then in zip(factors, before, strict=True))


@pytest.mark.parametrize("name", ("loop", "divided", "batched", "stacked", "gathered", "compiled"))
def test_outputs_depend_on_the_factors_that_a_strategy_reads(name: str) -> None:
    case = Case(SMALL[0], 8, "float32", 2, 24, False)
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


def test_an_interrupted_search_resumes(tmp_path: Path) -> None:
    journal, todo = tmp_path / "found.partial", some(5)
    assert list(search.search(todo, "cpu", journal, seconds=0.0)) == []
    first = list(search.search(todo[:2], "cpu", journal, seconds=60.0))
    line = json.loads(journal.read_text().splitlines()[-1])
    bucket = [*line["bucket"][:6], "SMOOTH", *line["bucket"][7:]]
    others = {"seconds": {"fastest": 1.0}}, {"ruled": "fastest"}, {"bucket": bucket}, {"seconds": None}
    with journal.open("a") as file:
        # Lines of other versions, and one that was cut off.
        file.writelines(json.dumps({**line, **other}) + "\n" for other in others)
        file.write('{"bucket": [1, 2')
    assert search.read(journal) == first
    rest = list(search.search(todo, "cpu", journal, seconds=60.0))
    assert rest[:2] == [None, None] and len(rest) == 5
    known = search.read(journal)
    assert len({finding.bucket for finding in known}) == len(known)


def test_a_wrong_strategy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SMALL[0], 8, "float32", 2, 8, True)
    assert search.error(case, "batched", "cpu") < 1e-5

    class Lazy:
        add_all = begin = refill = None

        def __init__(self, plan: SegmentPlan, stats: BatchStats) -> None: ...
        def __call__(self, *_: object) -> None: ...

    monkeypatch.setitem(STRATEGIES, "batched", Lazy)
    assert search.error(case, "batched", "cpu") > 0.1


# -- tilings and kernels of a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("tiled m16", "tiled", "tiled m16 n128 k128 s4 p3 w8", "loop"))
def test_a_tiling_is_found_again_by_its_name(name: str) -> None:
    for each in tiling.space(2):
        assert Tiling.named(each.name) == each
        assert all(size & (size - 1) == 0 for size in each[:4]) and min(each[:3]) >= 16
    with pytest.raises(ValueError, match="is not a tiling"):
        Tiling.named(name)


def test_tilings_too_large_are_left_out_and_default_ones_are_in_the_space() -> None:
    assert not tiling.fits(Tiling(128, 256, 256, 1, 4), 2)
    assert not any(each.num_stages * each.block_k * (each.block_m + 64) * 4 > 166_912 for each in tiling.space(4))
    least = list(tiling.space(2, tiling.LEAST_SHARED))
    assert len(list(tiling.space(2))) - len(least) > 40 and Tiling(64, 128, 128, 1, 4) not in least
    most = tiling.SHARED_BYTES[8, 0]
    decode = list(tiling.sensible(2, 3584, 1, 16, most))
    assert {each.block_m for each in decode} == {16} and {each.split_k for each in decode} == {0, 1, 2, 4, 8}
    prefill = list(tiling.sensible(2, 3584, 4096, 8192, most))
    assert {each.split_k for each in prefill} == {1}
    assert set(decode) < set(tiling.space(2))
    for itemsize in (2, 4):
        usual = set(tiling.all_usual(itemsize))
        assert usual <= set(tiling.space(itemsize, tiling.LEAST_SHARED))
        for d_in, longest, programs in itertools.product((16, 896, 18944), (1, 17, 33, 2048), (1, 4, 100, 5000)):
            assert tiling.usual(itemsize, d_in, longest, programs) in usual
            assert tiling.usual(itemsize, d_in, longest, programs, 16) in usual  # of a Jetson


@pytest.mark.parametrize(("num_tokens", "num_lanes", "rank"), itertools.product((1, 8, 64, 2048), (1, 8), (16, 64)))
def test_finalists_are_the_sensible_tilings_around_the_default(num_tokens: int, num_lanes: int, rank: int) -> None:
    longest = max(1, num_tokens // num_lanes)
    programs = tiling.shrink_programs([longest] * num_lanes, 3, rank)
    found = tiling.finalists(2, 3584, longest, num_tokens, programs)
    sensible = set(tiling.sensible(2, 3584, longest, num_tokens, tiling.SHARED_BYTES[8, 0]))
    assert len(found) == len(set(found)) == min(24, len(sensible)) and set(found) <= sensible
    default = tiling.usual(2, 3584, longest, programs)
    if default in sensible:
        assert found[0] == default
    assert any(not each.split_k for each in found) == any(not each.split_k for each in sensible)


def launched(case: Case, name: str) -> tuple[object, ...]:
    """The kernels that a tiling launches for a case, by their handles: equal kernels share one."""
    from atmm.triton.handles import Handle
    from atmm.triton.lanes import prepare

    group, stats = group_of(case), stats_of(case)
    strategy = prepare(case.plan(), stats, PackedPlaces(stats.layout), Tiling.named(name))
    y, x = (torch.empty(case.num_tokens, width, dtype=stats.layout.dtype) for width in (group.d_out, stats.layout.d_in))
    handles: list[Handle] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "__call__", lambda handle, *_: handles.append(handle))
        strategy.add_all(y, x, group)
    return tuple(handles)


def test_samples_cover_every_kernel_of_the_candidates_once() -> None:
    pytest.importorskip("triton")
    shapes = Shape(192, (96, 64)), Shape(100, (80,)), Shape(1024, (128,))
    chosen = [
        case for case in cases(shapes, ["bfloat16"]) if case.num_tokens in (1, 16, 256) and case.num_adapters <= 2
    ]
    samples = search.kernel_samples(chosen, tiling.SHARED_BYTES[8, 0])
    compiled = {launched(*each) for each in samples}
    assert len(set(map(kernel_key, samples))) == len(samples)
    needed = set()
    for case in chosen:
        lengths = [lane.stop - lane.start for lane in case.plan().lanes]
        programs = tiling.shrink_programs(lengths, len(case.shape.d_outs), case.rank)
        for each in tiling.finalists(2, case.shape.d_in, max(lengths), case.num_tokens, programs):
            needed.add(launched(case, each.name))
    assert needed <= compiled
    assert len(compiled) <= len(samples) <= 1.1 * len(compiled)


def test_samples_of_one_kernel_are_recognized() -> None:
    def key(*shape: Any, tiling: str = "tiled m16 n128 k128 s4 p3", **changed: Any) -> tuple[object, ...]:
        case = Case(Shape(*(shape or (3584, (3584, 512, 512)))), 16, "bfloat16", 1, 2, True)
        return kernel_key((case._replace(**changed), tiling))

    assert key(rank=8) == key() == key(18944, (3584, 3584, 3584))
    others = [
        key(rank=64),
        key(dtype="float32"),
        key(3600, (3584, 512, 512)),
        key(3584, (3584,)),
        key(3584, (3584, 512, 100)),
        key(tiling="tiled m16 n64 k64 s1 p2"),
    ]
    assert len({key(), *others}) == 1 + len(others)


class Immediate:
    """As Replays, without a graph."""

    def __init__(self, call: Callable[[], object], before: Callable[[], object], parts: int) -> None:
        self.call, self.before, self.parts = call, before, parts

    def __call__(self) -> float:
        self.before()
        self.call()
        return 1.0 / self.parts


@pytest.mark.parametrize("strategy", ["loop", "batched", "gathered"])
def test_a_replayed_call_adds_the_deltas_of_every_copy(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "Replays", Immediate)
    monkeypatch.setattr(search, "MOST_COPIES", 3)
    case = Case(Shape(48, (40, 16)), 8, "float32", 3, 12, True)
    group = case.group("cpu")
    (call,) = search.replayed_calls(case, group, [strategy], "cpu").values()
    assert isinstance(call, Immediate) and call.parts == 3
    with torch.inference_mode():
        assert call() == pytest.approx(1 / 3)
    _, plan, x, y = call.call.args  # type: ignore[attr-defined]
    exact = [reference.add_delta(torch.zeros(12, site.d_out), x, site, plan) for site in group.sites]
    torch.testing.assert_close(y.double(), 3 * torch.cat(exact, 1), rtol=1e-4, atol=1e-5)
    assert x.abs().max() > 0.1 and y.shape == (12, 56)


@pytest.mark.slow
def test_a_process_that_cannot_compile_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    with caplog.at_level(logging.WARNING):
        compile_kernels([], "cuda")  # starts no process
        assert not caplog.records
        compile_kernels([(Case(Shape(64, (64,)), 16, "bfloat16", 1, 2, True), "tiled m16 n64 k64 s1 p2")], "cuda")
    assert "kernels are compiled during the search" in caplog.text


# -- races ------------------------------------------------------------------------------------------------------------


def raced(enough_s: float = 60.0, **seconds: Sequence[float]) -> tuple[dict[str, float], list[str]]:
    """The result of a race, and its calls. A candidate takes its seconds, call by call, and then repeats the last."""
    log: list[str] = []

    def candidate(name: str, taken: Sequence[float]) -> Callable[[], float]:
        rest = itertools.chain(taken, itertools.repeat(taken[-1]))

        def call() -> float:
            log.append(name)
            return next(rest)

        return call

    calls = {name: candidate(name, taken) for name, taken in seconds.items()}
    return race(calls, turns=9, in_race=1.3, enough_s=enough_s), log


def test_slow_candidates_leave_a_race_and_the_first_call_does_not_count() -> None:
    assert raced(slow_to_start=(9.0, 1.0), steady=(1.1,))[0] == {"slow_to_start": 1.0, "steady": 1.1}
    found, log = raced(fast=(1.0,), near=(1.2,), behind=(2.0,))
    assert found == {"fast": 1.0, "near": 1.2, "behind": 2.0}
    assert [log.count(name) for name in ("fast", "near", "behind")] == [1 + 9, 1 + 9, 1 + 2]
    found, _ = raced(late=(3.0, 3.0, 0.9, 0.8), steady=(1.0,))
    assert found["late"] < found["steady"]
    assert len(raced(fast=(1.0,), behind=(2.0,))[1]) == 2 * (1 + 2), "one candidate is left"
    assert len(raced(0.0, a=(1.0,), b=(1.0,))[1]) == 2 * (1 + 2), "long calls need fewer turns"


def test_the_order_of_a_race_is_shuffled_and_one_fast_call_does_not_win() -> None:
    """One call in six takes two thirds of the time: the minimum of nine calls would be random."""
    draw = random.Random(1)
    lucky = [1.0, *(0.66 if draw.random() < 1 / 6 else 1.0 for _ in range(20))]
    found, _ = raced(lucky=lucky, steady=(0.8,))
    assert min(lucky) < 0.8 < found["lucky"] and found["steady"] == 0.8
    _, log = raced(a=(1.0,), b=(1.0,), c=(1.0,))
    turns = [tuple(log[start : start + 3]) for start in range(3, len(log), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(set(turns)) > 2


def test_contention_is_the_time_without_a_core_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*nanoseconds: int) -> None:
        for number, each in enumerate(nanoseconds):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "schedstat").write_text(f"900000000 {each} 12\n")

    monkeypatch.setattr(matmul_choice, "TASKS", tmp_path)
    now = 10.0
    monkeypatch.setattr(matmul_choice.time, "monotonic", lambda: now)
    waited(5_000_000_000, 0)
    found = Contention()
    now += 2.0
    waited(5_040_000_000, 40_000_000)
    assert not found.disturbs(), "80 ms of 2 s"
    waited(5_040_000_000, 80_000_000)
    assert found.disturbs(), "120 ms of 2 s"
    monkeypatch.setattr(matmul_choice, "TASKS", tmp_path / "none")
    assert not Contention().disturbs(), "a system without these files"


# -- the method of matrix products ------------------------------------------------------------------------------------


class Machine:
    """A clock that every method advances by its configured time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        self.seconds = {"rows": 4.0, "library": 3.0, "float32": 1.0, **seconds}
        for method in self.seconds:
            monkeypatch.setitem(matmul.METHODS, method, functools.partial(self._call, method))  # type: ignore[misc]

    def __call__(self) -> float:
        return self.now

    def _call(self, method: str, x: Tensor, layers: Sequence[Weights]) -> Tensor:
        self.now += self.taken_s(method, len(x))
        self.calls.append((method, len(x)))
        return x.new_empty(len(x), 0)

    def taken_s(self, method: str, num_rows: int) -> float:
        return self.seconds[method]


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache folder, no measured choices, and layers of all sizes measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul, "measured", {})
    monkeypatch.setattr(matmul_choice, "LARGE", 1)
    monkeypatch.setattr(matmul, "multiplies", lambda weight: True)
    monkeypatch.setattr(matmul, "has_tiles", lambda dtype: False)
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(Contention, "disturbs", lambda self: False)
    return tmp_path


@pytest.fixture
def machine(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


WEIGHTS = [torch.zeros(8, 4, dtype=torch.bfloat16) for _ in range(3)]


def method_for(num_rows: int) -> str:
    with torch.inference_mode():
        return matmul.choose(num_rows, WEIGHTS[0])


def test_the_fastest_method_is_cached_for_later_starts_on_the_same_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of threads, other instructions and another version are measured for themselves."""
    assert method_for(3) == "rows"
    matmul_choice.measure(WEIGHTS, machine)
    assert [method_for(rows) for rows in (1, 3, 20, 128, 300, 5000)] == ["float32"] * 6
    machine.calls.clear()
    monkeypatch.setattr(matmul, "measured", {})
    matmul_choice.measure(WEIGHTS, machine)
    assert not machine.calls and method_for(3) == "float32"
    for target, name, value in (
        (torch, "get_num_threads", lambda: 77),
        (torch, "__version__", "77"),
        (processor, "flags", lambda: frozenset({"another"})),
        (matmul_choice, "library", lambda: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            machine.calls.clear()
            matmul_choice.measure(WEIGHTS, machine)
            assert machine.calls, name


def test_disturbed_measurements_are_discarded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contention, "disturbs", lambda self: True)
    matmul_choice.measure(WEIGHTS, machine)
    assert machine.calls and method_for(3) == "rows"
    monkeypatch.setattr(Contention, "disturbs", lambda self: False)
    matmul_choice.measure(WEIGHTS, machine)
    assert method_for(3) == "float32", "the next start measures"


def test_small_differences_and_small_models_keep_the_rule(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(matmul_choice, "LARGE", 10**9)
        machine = Machine(monkeypatch)
        matmul_choice.measure(WEIGHTS, machine)
        assert not machine.calls and method_for(3) == "rows" and not (isolated / "vlora").exists()
    matmul_choice.measure(WEIGHTS, Machine(monkeypatch, rows=1.0, library=0.98, float32=0.96))
    assert method_for(8) == "rows" and method_for(64) == "float32"


def test_a_pause_during_one_measurement_does_not_change_the_rule(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow method is not called more often."""
    paused = iter((100.0, 100.0, 100.0))

    def taken_s(method: str, num_rows: int) -> float:
        seconds = {"rows": 4.0, "library": 3.0, "float32": 2.0}[method]
        return next(paused, seconds) if (method, num_rows) == ("float32", 512) else seconds

    monkeypatch.setattr(machine, "taken_s", taken_s)
    matmul_choice.measure(WEIGHTS, machine)
    assert next(paused, None) is None and [method_for(rows) for rows in (8, 256, 512)] == ["float32"] * 3


@pytest.mark.parametrize(
    "content", ("{", "[[1, 8]]", '[["a", 8, 4, "torch.bfloat16", "rows"]]', '[[1, 8, 4, "no", "rows"]]')
)
def test_an_unreadable_file_is_measured_again(
    content: str, machine: Machine, isolated: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matmul_choice.measure(WEIGHTS, machine)
    (file,) = (isolated / "vlora").iterdir()
    file.write_text(content)
    monkeypatch.setattr(matmul, "measured", {})
    matmul_choice.measure(WEIGHTS, machine)
    assert method_for(3) == "float32" and "cannot be read" in caplog.text
    assert len(json.loads(file.read_text())) == 10


def test_measured_products_are_used_without_a_cache_folder(
    machine: Machine, isolated: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (isolated / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(isolated / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        matmul_choice.measure(WEIGHTS, machine)
    assert method_for(3) == "float32"
    message = caplog.records[-1].getMessage()
    assert message.startswith("matrix products are measured at every start: the result cannot be cached: ")
    assert message.endswith("set XDG_CACHE_HOME to a writable folder")


@pytest.mark.usefixtures("isolated")
def test_the_real_methods_are_measured_without_error() -> None:
    weights = [torch.randn(64, 48).bfloat16() for _ in range(2)] + [torch.randn(64, 48)]
    matmul_choice.measure(weights)
    assert {key[1:] for key in matmul.measured} == {(64, 48, torch.bfloat16), (64, 48, torch.float32)}
