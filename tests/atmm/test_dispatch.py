"""Selection of a strategy: buckets and their keys, tables, the rule, and the number of selections."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atmm import STRATEGIES, Lane, SegmentPlan, dispatch, operator, processor
from atmm.batch_stats import BatchStats
from atmm.layers import Layout
from atmm.tuning import tables
from atmm.tuning.buckets import DEVICE_TYPES, DTYPES, Bucket, Evenness
from tests.atmm.cases import check_against_reference, make_group, make_input, segments
from tests.atmm.test_cpu import needs_compiler

BUCKETS = st.builds(
    Bucket,
    tokens=st.integers(0, 2**24 - 1),
    adapters=st.integers(0, 2**16 - 1),
    rank=st.integers(0, 2**16 - 1),
    d_in=st.integers(0, 2**20 - 1),
    d_out=st.integers(0, 2**20 - 1),
    num_sites=st.integers(0, 2**8 - 1),
    evenness=st.sampled_from(Evenness),
    dtype=st.sampled_from(DTYPES),
    device_type=st.sampled_from(DEVICE_TYPES),
)


@given(BUCKETS, BUCKETS)
def test_keys_are_128_bit_and_differ_where_buckets_differ(one: Bucket, other: Bucket) -> None:
    assert 0 <= one.key() < 2**128
    assert (one.key() == other.key()) == (one == other)


def test_keys_of_neighbouring_buckets_differ() -> None:
    values = (1, 2, 255, 256)
    buckets = [
        Bucket(*fields)
        for fields in itertools.product(values, values, values, values, values, (1, 3), Evenness, DTYPES, DEVICE_TYPES)
    ]
    assert len({bucket.key() for bucket in buckets}) == len(buckets)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"tokens": 2**24}, "tokens is 16777216"),
        ({"d_out": 2**20}, "d_out is 1048576"),
        ({"rank": -1}, "rank is -1"),
        ({"dtype": torch.int8}, "int8"),
        ({"device_type": "tpu"}, "tpu"),
    ),
)
def test_sizes_that_do_not_fit_a_key_are_refused(change: dict, words: str) -> None:
    bucket = Bucket(1, 1, 1, 1, 1, 1, Evenness.SINGLE, torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        bucket._replace(**change).key()


@pytest.mark.parametrize(
    ("num_tokens", "lanes", "expected"),
    (
        (9, [Lane("a", 0, 9)], (16, 1, 4, Evenness.SINGLE)),
        (9, [Lane("a", 2, 7)], (8, 1, 4, Evenness.SINGLE)),
        (6, segments({"a": 3, "b": 3}), (8, 2, 4, Evenness.EVEN)),
        (6, segments({"b": 3, "a": 3}), (8, 2, 4, Evenness.RAGGED)),
        (6, segments({"a": 2, "b": 4}), (8, 2, 4, Evenness.RAGGED)),
        (6, [Lane("a", 0, 3), Lane("b", 3, 6, -1.0)], (8, 2, 4, Evenness.RAGGED)),
        (8, segments({"a": 4, "c": 4}), (8, 2, 16, Evenness.RAGGED)),
    ),
)
def test_statistics_fall_into_their_bucket(num_tokens: int, lanes: list[Lane], expected: tuple) -> None:
    group = make_group({"a": 4, "b": 4, "c": 16}, d_in=48, d_outs=(40, 16, 16))
    group.pack("abc")
    assert group.packed is not None
    bucket = Bucket.of(BatchStats(SegmentPlan(num_tokens, lanes), group.packed.layout))
    assert (bucket.tokens, bucket.adapters, bucket.rank, bucket.evenness) == expected
    assert (bucket.d_in, bucket.d_out, bucket.num_sites) == (64, 128, 3)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    monkeypatch.setattr(dispatch, "serves", lambda device, dtype: False)


def test_thin_batches_use_the_compiled_kernels_where_available(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group({"a": 4, "b": 4})
    group.pack("ab")
    assert group.packed is not None
    monkeypatch.setattr(dispatch, "serves", lambda device, dtype: True)
    for num_tokens, expected in ((2, True), (32, True), (4096, False)):
        stats = BatchStats(SegmentPlan(num_tokens, segments({"a": 1, "b": num_tokens - 1})), group.packed.layout)
        assert (dispatch.choose(stats) == "compiled") == expected


@pytest.mark.usefixtures("plain")
def test_the_table_decides_where_it_knows_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group({"a": 4, "b": 4})
    group.pack("ab")
    assert group.packed is not None
    stats = BatchStats(SegmentPlan(6, segments({"a": 3, "b": 3})), group.packed.layout)
    for name in STRATEGIES:
        monkeypatch.setattr(dispatch, "table_for", lambda _, name=name: {Bucket.of(stats).key(): name})
        assert dispatch.choose(stats) == name
    monkeypatch.setattr(dispatch, "table_for", lambda _: {})
    assert dispatch.choose(stats) == dispatch.rule(stats)


@pytest.mark.usefixtures("plain")
def test_the_table_is_skipped_if_unused_adapters_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group({"a": 4, "b": 4, "c": 64})
    group.pack("abc")
    assert group.packed is not None
    stats = BatchStats(SegmentPlan(6, segments({"a": 3, "b": 3})), group.packed.layout)
    monkeypatch.setattr(dispatch, "table_for", lambda _: {Bucket.of(stats).key(): "no such strategy"})
    assert dispatch.choose(stats) == dispatch.rule(stats)


@pytest.mark.parametrize(
    ("num_tokens", "ranks", "lengths", "expected"),
    (
        (4, {"a": 16, "b": 16, "c": 16, "d": 16}, {"a": 1, "b": 1, "c": 1, "d": 1}, {"gathered", "stacked"}),
        (512, {"a": 64, "b": 64}, {"a": 256, "b": 256}, {"batched", "loop"}),
        (512, {"a": 64, "b": 64, "c": 64, "d": 64}, {"b": 300, "a": 200, "d": 10, "c": 2}, {"loop", "batched"}),
    ),
)
@pytest.mark.usefixtures("plain")
def test_the_rule_prefers_few_calls_for_decoding_and_no_waste_for_prefill(
    num_tokens: int, ranks: dict, lengths: dict, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    group = make_group(ranks, d_in=896, d_outs=(4864, 4864), dtype=torch.bfloat16)
    group.pack(ranks)
    assert group.packed is not None
    assert dispatch.rule(BatchStats(SegmentPlan(num_tokens, segments(lengths)), group.packed.layout)) in expected


@needs_compiler
@pytest.mark.parametrize("lengths", ((512,), (64, 64, 64, 64), (300, 2, 2, 2)), ids=str)
def test_where_bfloat16_products_are_slow_long_lanes_are_multiplied_in_float32(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies on packed copies multiply in the factors' type, which then takes up to 15 times as long."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    ranks = dict.fromkeys("abcd"[: len(lengths)], 64)
    plan = SegmentPlan(sum(lengths), segments(dict(zip(ranks, lengths, strict=True))))
    for dtype in (torch.bfloat16, torch.float32):
        group = make_group(ranks, d_in=896, d_outs=(128,), dtype=dtype)
        group.pack(ranks)
        assert group.packed is not None
        in_float32 = dispatch.rule(BatchStats(plan, group.packed.layout)) == "divided"
        assert in_float32 == (dtype is torch.bfloat16 or len(set(lengths)) > 1)


def test_a_strategy_is_chosen_once_per_class_of_sites_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def choose(stats: BatchStats, transposed: bool) -> str:
        chosen.append(stats.layout.d_in)
        return "stacked"

    monkeypatch.setattr(operator, "choose", choose)
    for step in range(2):
        plan = SegmentPlan(6, segments({"a": 3, "b": 3}))
        for layer in range(4):
            for d_in, d_outs in ((48, (40, 16, 16)), (40, (48,))):
                group = make_group({"a": 4, "b": 4}, d_in=d_in, d_outs=d_outs, seed=layer)
                group.pack("ab")
                check_against_reference(group, plan, *make_input(6, group, torch.float32))
        assert chosen == [48, 40] * (step + 1)


def test_an_unknown_strategy_is_refused_by_name() -> None:
    group = make_group({"a": 4})
    x, outputs = make_input(2, group, torch.float32)
    with pytest.raises(ValueError, match=r"'fastest'.*loop, batched, stacked, gathered"):
        operator.add_delta(outputs[0], x, group.sites[0], SegmentPlan(2, [Lane("a", 0, 2)], "fastest"))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("loop", "divided", "compiled")])
def test_a_strategy_that_needs_a_packed_copy_says_so(strategy: str) -> None:
    group = make_group({"a": 4, "b": 4})
    x, outputs = make_input(2, group, torch.float32)
    for keys in ("", "b"):
        group.pack(keys)
        with pytest.raises(ValueError, match="packed copy of a"):
            operator.add_delta(outputs[0], x, group.sites[0], SegmentPlan(2, [Lane("a", 0, 2)], strategy))


def test_compiled_without_packing_is_refused_for_types_without_kernels() -> None:
    group = make_group({"a": 4}, dtype=torch.float16)
    x, outputs = make_input(2, group, torch.float16)
    with pytest.raises(ValueError, match=r"'compiled' needs a packed copy of a for torch.float16 on cpu"):
        operator.add_delta(outputs[0], x, group.sites[0], SegmentPlan(2, [Lane("a", 0, 2)], "compiled"))
    group.pack("a")
    check_against_reference(group, SegmentPlan(2, [Lane("a", 0, 2)], "compiled"), x, outputs)


def test_a_table_is_read_as_it_was_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        (Bucket(4, 4, 16, 1024, 2048, 3, Evenness.EVEN, torch.bfloat16, "cpu"), "gathered"),
        (Bucket(256, 1, 64, 1024, 1024, 1, Evenness.SINGLE, torch.float32, "cpu"), "loop"),
    ]
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tables.path_for("cpu", torch.get_num_threads())
    assert path.parent == tmp_path / "vlora" / "tables"
    tables.write(path, "cpu", "2026-01-01", rows)
    document = json.loads(path.read_text())
    assert {"device", "torch", "threads", "date", "columns", "rows"} == set(document)
    tables.choose_table.cache_clear()
    try:
        assert tables.table_for("cpu") == {bucket.key(): name for bucket, name in rows}
    finally:
        tables.choose_table.cache_clear()


@pytest.mark.parametrize(
    ("flags", "expected"),
    (
        ("avx2 fma", "cpu-avx512"),
        ("avx512f avx512_bf16", "cpu-avx512-bf16"),
        ("avx512f avx512_bf16 amx_bf16 amx_tile", "cpu-avx512-amx"),
    ),
)
def test_a_cpu_is_named_by_its_products(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert tables.device_name("cpu") == expected
    assert tables.path_for("cpu", 3).name == f"{expected}-t3.json"


@pytest.mark.parametrize("path", sorted(tables.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_have_this_version(path: pathlib.Path) -> None:
    document = json.loads(path.read_text())
    assert document["device"].lower().replace(" ", "-") == path.stem and document["rows"]
    assert {"torch", "threads", "date"} <= set(document)
    assert ("capability" in document) != path.stem.startswith("cpu-")
    assert tables.read_table(path, "cuda" if "capability" in document else "cpu").rows


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("lengths", ({"a": 1, "b": 1}, {"a": 500, "b": 12}))
def test_a_gpu_uses_the_tiled_kernels_by_rule(dtype: torch.dtype, lengths: dict[str, int]) -> None:
    group = make_group({"a": 4, "b": 8}, dtype=dtype)
    group.pack("ab")
    assert group.packed is not None
    near = group.packed.layout
    spans = tuple(tuple(site.values()) for site in near.spans)
    layout = Layout(near.keys, spans, near.d_in, near.d_outs, near.dtype, torch.device("cuda"))
    stats = BatchStats(SegmentPlan(sum(lengths.values()), segments(lengths)), layout)
    supported = dtype is not torch.float64
    assert (dispatch.rule(stats) == "tiled") == supported
    assert dispatch.rule(stats) in STRATEGIES
