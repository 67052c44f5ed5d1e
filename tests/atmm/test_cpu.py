"""The compiled CPU kernels: the same results as their torch fallbacks for all shapes, and the fallback without them."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from atmm import Factors, Lane, SegmentPlan, Site, SiteGroup, add_delta, cpu, merge, reference
from atmm.cpu.lanes import Compiled, Scattered
from tests.atmm.cases import check_against_reference, make_group, make_input, segments

needs_compiler = pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A separate cache folder, and no loaded library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    yield tmp_path
    cpu.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("d_in", (16, 37, 200))
@pytest.mark.parametrize("packed", ("abc", "ab", ""))
def test_odd_shapes_and_strides(packed: str, d_in: int, transposed: bool, dtype: torch.dtype) -> None:
    group = make_group({"a": 3, "b": 8, "c": 17}, d_in=d_in, dtype=dtype)
    group.pack(packed)
    for num_tokens, lanes in (
        (1, [Lane("c", 0, 1)]),
        (9, [Lane("a", 1, 6), Lane("b", 6, 8), Lane("c", 0, 8, -1.0)]),
        (17, segments({"a": 5, "b": 5, "c": 7})),
    ):
        plan = SegmentPlan(num_tokens, lanes, "compiled")
        x, outputs = make_input(num_tokens, group, dtype)
        if transposed:
            x, outputs = x.t().contiguous().t(), [y.t().contiguous().t() for y in outputs]
        assert check_against_reference(group, plan, x, outputs) > 1
        expected = Compiled if plan.keys <= set(packed) else Scattered
        assert all(isinstance(strategy, expected) for strategy in plan.prepared.values())


@needs_compiler
def test_adapters_are_read_at_their_current_address() -> None:
    group = make_group({"a": 4, "b": 8}, missing=[("b", 1)])
    site = group.sites[0]
    plan = SegmentPlan(5, [*segments({"a": 2, "b": 3}), Lane("c", 1, 4, -1.0)], "compiled")
    for change in (
        lambda: None,
        lambda: site.factors.update(a=Factors(torch.randn(6, site.d_in), torch.randn(6, site.d_out))),
        lambda: site.factors.update(a=Factors(*(factor.t().contiguous().t() for factor in site.factors["a"]))),
        lambda: site.factors["a"].a.mul_(2),  # in place, without contiguous rows
        lambda: site.factors.update(a=Factors(torch.empty(0, site.d_in), torch.empty(0, site.d_out))),
        lambda: site.factors.pop("a"),
        lambda: site.factors.update(c=Factors(torch.randn(2, site.d_in), torch.randn(2, site.d_out))),
    ):
        change()
        assert check_against_reference(group, plan, *make_input(5, group, torch.float32)) > 0


@needs_compiler
def test_addresses_of_factors_are_shared_by_all_plans() -> None:
    group = make_group({"a": 4, "b": 8, "c": 3})
    known = {key: factors.rows for key, factors in group.sites[0].factors.items()}
    for lanes in (segments({"a": 1, "b": 4}), segments({"b": 2, "c": 3}), [Lane("c", 0, 5), Lane("a", 1, 3, -1.0)]):
        assert check_against_reference(group, SegmentPlan(5, lanes), *make_input(5, group, torch.float32)) > 0
    assert all(factors.rows is known[key] for key, factors in group.sites[0].factors.items())
    assert all(rows is not None for rows in known.values())


@needs_compiler
@pytest.mark.parametrize("packed", ("", "a"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_factors_at_odd_addresses(dtype: torch.dtype, packed: str) -> None:
    group = make_group({"a": 5}, dtype=dtype)
    for site in group.sites:
        odd = []
        for factor in site.factors["a"]:
            room = torch.zeros(factor.nbytes + 1, dtype=torch.uint8)
            room[1:] = factor.reshape(-1).view(torch.uint8)
            odd.append(torch.frombuffer(room.numpy(), dtype=dtype, offset=1).view(factor.shape))
            assert odd[-1].data_ptr() % factor.element_size()
        site.factors["a"] = Factors(*odd)
    group.pack(packed)
    x, outputs = make_input(3, group, dtype)
    assert check_against_reference(group, SegmentPlan(3, [Lane("a", 0, 3)]), x, outputs) > 0


@needs_compiler
def test_columns_of_one_value_and_empty_factors_count_as_rows() -> None:
    site = Site("site", 1, 5)
    group = SiteGroup([site])
    site.factors["a"] = Factors(torch.randn(1, 3).t(), torch.randn(3, 5))
    site.factors["b"] = Factors(torch.empty(1, 0).t(), torch.empty(5, 0).t())
    x, outputs = make_input(4, group, torch.float32)
    plan = SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 2, 4)])
    assert check_against_reference(group, plan, x, outputs) > 0
    assert all(factors.rows is not None for factors in site.factors.values())


@needs_compiler
def test_adapters_of_another_dtype_are_refused() -> None:
    group = make_group({"a": 4}, dtype=torch.bfloat16)
    x, outputs = make_input(2, group, torch.float32)
    with pytest.raises(ValueError, match=r"x is torch.float32.*adapter 'a' torch.bfloat16"):
        add_delta(outputs[0], x, group.sites[0], SegmentPlan(2, [Lane("a", 0, 2)]))


@needs_compiler
def test_threads_share_the_work_and_change_no_bit() -> None:
    group = make_group({"a": 8, "b": 16}, d_in=96, dtype=torch.bfloat16)
    group.pack("ab")
    base, a, bt = torch.randn(2, 75, 5120), torch.randn(2, 20, 5120), torch.randn(2, 20, 75)  # blocks of columns
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            x, outputs = make_input(12, group, torch.bfloat16)
            plan = SegmentPlan(12, segments({"a": 5, "b": 7}), "compiled")
            assert check_against_reference(group, plan, x, outputs) > 1
            merged = torch.empty_like(base)
            merge(merged, base, a, bt)
            found.append((outputs, merged))
    finally:
        torch.set_num_threads(threads)
    (first_outputs, first_merged), (outputs, merged) = found
    assert torch.equal(first_merged, merged)
    assert all(torch.equal(one, other) for one, other in zip(first_outputs, outputs, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    "lanes",
    (
        pytest.param([Lane("c", 0, 1)], id="one lane"),
        pytest.param([Lane("a", 0, 1), Lane("b", 1, 3), Lane("c", 3, 4)], id="apart"),
        pytest.param([Lane("a", 0, 1), Lane("b", 1, 3), Lane("c", 0, 4, -1.0)], id="common tokens"),
    ),
)
@pytest.mark.parametrize("packed", ("abc", ""))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_number_of_threads_changes_no_bit(lanes: list[Lane], packed: str, dtype: torch.dtype) -> None:
    """Parts of an adapter's rows and of its features are computed by different threads."""
    group = make_group({"a": 3, "b": 8, "c": 17}, d_in=96, dtype=dtype)
    group.pack(packed)
    x, outputs = make_input(4, group, dtype)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            ys = [y.clone() for y in outputs]
            plan = SegmentPlan(4, lanes, "compiled")
            assert check_against_reference(group, plan, x, ys) > 1
            found.append(ys)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for ys in found for one, other in zip(found[0], ys, strict=True))


@needs_compiler
@pytest.mark.parametrize("o, i", ((1, 1), (5, 16), (8, 33), (70, 96)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_merge_of_odd_shapes_equals_plain_torch(
    dtype: torch.dtype, o: int, i: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(o * i)
    shapes = ((3, o, i), (3, 6, i), (3, 6, o))
    base, a, bt = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    base[0, 0, 0] = float("nan")
    base[1, 0, 0] = float("inf")
    ours, twins = torch.empty_like(base), torch.empty_like(base)
    merge(ours, base, a, bt, -0.5)
    monkeypatch.setattr("atmm.operator.library", lambda: None)
    merge(twins, base, a, bt, -0.5)
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, twins, rtol=close, atol=close, equal_nan=True)
    expected = reference.merge(base, a, bt, -0.5)
    torch.testing.assert_close(ours.double(), expected, rtol=close, atol=close, equal_nan=True)


@pytest.fixture(scope="session")
def copying_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Instead of ten seconds of compiling, it copies the kernels that this process has loaded. $TARGET: its target."""
    built = next(each.path for each in psutil.Process().memory_maps() if Path(each.path).match("vlora/atmm-*.so"))
    script = tmp_path_factory.mktemp("compiler") / "c++"
    script.write_text(f'#!/bin/sh\nfor output; do :; done\necho "$TARGET"\n[ -c "$output" ] || cp {built} "$output"\n')
    script.chmod(0o755)
    return script


@needs_compiler
def test_built_kernels_are_found_again(fresh: Path, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    assert cpu.library() is not None
    (file,) = (fresh / "vlora").iterdir()
    assert stat.S_IMODE((fresh / "vlora").stat().st_mode) == 0o700
    built = file.stat().st_mtime_ns
    cpu.library.cache_clear()
    assert cpu.library() is not None
    assert file.stat().st_mtime_ns == built


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory shared by several machines, so that tests share builds (8 s each)."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(params=("x86-64", "x86-64-v3"))
def another_processor(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The compiler targets an older processor, without AVX-512 and perhaps without AVX."""
    if platform.machine() != "x86_64":
        pytest.skip("instructions of x86-64")
    script = home / f"c++-{request.param}"
    script.write_text(
        "#!/bin/sh\n"
        f'for word; do shift; [ "$word" = -march=native ] && word=-march={request.param}; set -- "$@" "$word"; done\n'
        f'exec {shutil.which(os.environ.get("CXX", "c++"))} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    cpu.library.cache_clear()
    yield request.param
    cpu.library.cache_clear()


@needs_compiler
def test_machines_that_share_a_home_folder_compile_their_own_kernels(
    fresh: Path, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(cpu, "Library", loaded.append)
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setenv("TARGET", "theirs")
    cpu.library()
    built = loaded[0].stat().st_mtime_ns
    monkeypatch.setenv("TARGET", "ours")
    cpu.library.cache_clear()
    cpu.library()
    theirs, ours = loaded
    assert theirs != ours and {theirs, ours} == set((fresh / "vlora").iterdir())
    assert theirs.stat().st_mtime_ns == built


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_processors_without_wide_vectors_agree_with_the_reference(another_processor: str, dtype: torch.dtype) -> None:
    group = make_group({"a": 3, "b": 8, "c": 17}, d_in=37, dtype=dtype)
    plan = SegmentPlan(17, [*segments({"a": 5, "b": 5, "c": 7}), Lane("a", 5, 17, -1.0)], "compiled")
    x, outputs = make_input(17, group, dtype)
    assert check_against_reference(group, plan, x, outputs) > 1
    x, outputs = make_input(17, group, dtype)
    columns = [y.t().contiguous().t() for y in outputs]
    assert check_against_reference(group, plan, x.t().contiguous().t(), columns) > 1
    assert all(isinstance(strategy, Scattered) for strategy in plan.prepared.values())


def _rounded_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    # Products of two bfloat16 values are exact in float32, and one in 2^7 of them is midway between two neighbours.
    a, bt = (torch.randn(1, 1, size, generator=generator).bfloat16() for size in (200, 100))
    a[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 3e38, 0.0])
    bt[0, 0, 0] = 1.0
    out = torch.empty(1, 100, 200, dtype=torch.bfloat16)
    merge(out, torch.zeros_like(out), a, bt)
    expected = (bt.float().transpose(1, 2) * a.float()).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_bfloat16_is_rounded_as_torch_does() -> None:
    _rounded_as_torch_does()


@needs_compiler
@pytest.mark.exhaustive
def test_bfloat16_is_rounded_alike_by_every_processor(another_processor: str) -> None:
    _rounded_as_torch_does()


def test_without_a_compiler_plain_torch_is_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):  # visible at the default level
        assert cpu.library() is None
        assert cpu.library() is None
    assert caplog.text.count("no C++ compiler") == 1  # logged once
    group = make_group({"a": 8})
    group.pack("a")
    plan = SegmentPlan(2, [Lane("a", 0, 2)], "compiled")
    assert check_against_reference(group, plan, *make_input(2, group, torch.float32)) > 1


def test_a_failing_compiler_is_reported_and_not_tried_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fresh / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'cannot find a target' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert cpu.library() is None
    assert "cannot find a target" in caplog.text


def test_the_environment_disables_the_compiled_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATMM_COMPILED", "0")
    assert cpu.library() is None
    assert not list(fresh.iterdir())


@needs_compiler
def test_a_type_without_a_kernel_uses_plain_torch() -> None:
    group = make_group({"a": 8}, dtype=torch.float64)
    group.pack("a")
    plan = SegmentPlan(2, [Lane("a", 0, 2)], "compiled")
    assert check_against_reference(group, plan, *make_input(2, group, torch.float64)) > 1
    assert not any(isinstance(strategy, Compiled) for strategy in plan.prepared.values())
