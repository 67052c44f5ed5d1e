"""Selection of a strategy: buckets, the rule, measured tables, and kernels compiled ahead."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest
import torch

import atmm.warmup
from atmm import STRATEGIES, Lane, SegmentPlan, compile_ahead, compile_merges, dispatch, operator, processor
from atmm.segments import BatchStats
from atmm.strategies.hybrid import divides
from atmm.triton import tiling
from atmm.triton.tiling import Tiling, all_usual, shrink_programs, usual
from atmm.tuning import tables
from atmm.tuning.tables import Bucket, Evenness
from tests.atmm.cases import check_against_reference, make_group, make_input, needs_compiler, segments, stats_of

# -- buckets ----------------------------------------------------------------------------------------------------------


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
    bucket = Bucket.of(stats_of({"a": 4, "b": 4, "c": 16}, lanes, num_tokens=num_tokens))
    assert (bucket.tokens, bucket.adapters, bucket.rank, bucket.evenness) == expected
    assert (bucket.d_in, bucket.d_out, bucket.num_sites) == (64, 128, 3)


# -- the rule, and a table before it ----------------------------------------------------------------------------------

HALVES = segments({"a": 3, "b": 3})


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    monkeypatch.setattr(dispatch, "serves", lambda device, dtype: False)


@pytest.mark.usefixtures("plain")
def test_the_table_decides_where_it_knows_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped if unused adapters are packed."""
    stats, others = stats_of({"a": 4, "b": 4}, HALVES), stats_of({"a": 4, "b": 4, "c": 64}, HALVES)
    for name in STRATEGIES:
        monkeypatch.setattr(dispatch, "table_for", lambda _, name=name: {Bucket.of(stats): name})
        assert dispatch.choose(stats) == name
        assert dispatch.choose(others) == dispatch.rule(others)
    monkeypatch.setattr(dispatch, "table_for", lambda _: {})
    assert dispatch.choose(stats) == dispatch.rule(stats)


@pytest.mark.parametrize(
    ("serves", "rank", "lengths", "expected"),
    (
        # Thin batches use the compiled kernels where available.
        (True, 4, {"a": 1, "b": 1}, {"compiled"}),
        (True, 4, {"a": 1, "b": 31}, {"compiled"}),
        (True, 4, {"a": 1, "b": 4095}, STRATEGIES.keys() - {"compiled"}),
        # Without them, few calls for decoding and no waste for prefill.
        (False, 16, {"a": 1, "b": 1, "c": 1, "d": 1}, {"gathered", "stacked"}),
        (False, 64, {"a": 256, "b": 256}, {"batched", "loop"}),
        (False, 64, {"b": 300, "a": 200, "d": 10, "c": 2}, {"loop", "batched"}),
    ),
)
def test_the_rule(
    serves: bool, rank: int, lengths: dict[str, int], expected: Set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "serves", lambda device, dtype: serves)
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    ranks = dict.fromkeys(sorted(lengths), rank)
    stats = stats_of(ranks, segments(lengths), d_in=896, d_outs=(4864, 4864), dtype=torch.bfloat16)
    assert dispatch.rule(stats) in expected


@needs_compiler
@pytest.mark.parametrize("lengths", ((512,), (64, 64, 64, 64), (300, 2, 2, 2), (1, 1, 1, 64), (1, 1, 1, 2)), ids=str)
@pytest.mark.parametrize("fast", (True, False))
def test_short_and_long_lanes_are_divided_and_all_long_ones_where_bfloat16_is_slow(
    lengths: tuple[int, ...], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies on packed copies multiply in the factors' type, which then takes up to 15 times as long."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    ranks = dict.fromkeys("abcd"[: len(lengths)], 64)
    lanes = segments(dict(zip(ranks, lengths, strict=True)))
    assert divides(lanes) == (min(lengths) < 9 < max(lengths))
    for dtype in (torch.bfloat16, torch.float32):
        divided = dispatch.rule(stats_of(ranks, lanes, d_in=896, d_outs=(128,), dtype=dtype)) == "divided"
        slow = dtype is torch.bfloat16 and not fast and sum(lengths) > 32
        assert divided == (slow or divides(lanes))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("lengths", ({"a": 1, "b": 1}, {"a": 500, "b": 12}))
def test_a_gpu_uses_the_tiled_kernels_by_rule(dtype: torch.dtype, lengths: dict[str, int]) -> None:
    rule = dispatch.rule(stats_of({"a": 4, "b": 8}, segments(lengths), on_gpu=True, dtype=dtype))
    assert rule in STRATEGIES and (rule == "tiled") == (dtype is not torch.float64)


@pytest.mark.parametrize(
    ("longest", "expected"),
    ((1, Tiling(16, 128, 128, 8, 3)), (30, Tiling(32, 128, 128, 8, 3)), (4096, Tiling(64, 128, 128, 1, 3))),
)
def test_the_default_tiling_is_that_of_the_longest_lane(
    longest: int, expected: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_lanes = pytest.importorskip("atmm.triton.lanes")
    chosen: list[Any] = []
    monkeypatch.setattr(triton_lanes, "Tiled", lambda plan, stats, source, blocks: chosen.append(blocks))
    lanes = segments({"a": 1, "b": longest, "c": 1})
    stats = stats_of({"a": 4, "b": 8, "c": 70}, lanes, d_in=3584, d_outs=(64, 64, 64), dtype=torch.bfloat16)
    triton_lanes.prepare(SegmentPlan(longest + 2, lanes), stats, None)
    assert usual(2, 3584, longest, shrink_programs((1, longest, 1), 3, 70)) == expected
    assert chosen == [(expected, 64, 128)], "two blocks of 64 rows hold the highest rank"


def test_a_strategy_is_chosen_once_per_class_of_sites_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def choose(stats: BatchStats) -> str:
        chosen.append(stats.layout.d_in)
        return "stacked"

    monkeypatch.setattr(operator, "choose", choose)
    for step in range(2):
        plan = SegmentPlan(6, HALVES)
        for layer in range(4):
            for d_in, d_outs in ((48, (40, 16, 16)), (40, (48,))):
                group = make_group({"a": 4, "b": 4}, d_in=d_in, d_outs=d_outs, seed=layer)
                group.pack("ab")
                check_against_reference(group, plan, *make_input(6, group, torch.float32))
        assert chosen == [48, 40] * (step + 1)


# -- files of tables --------------------------------------------------------------------------------------------------

ROW = [4, 4, 16, 1024, 2048, 1, "EVEN", "float32", "gathered"]
HERE = "cpu-avx512-bf16"

Put = Callable[..., pathlib.Path]


@pytest.fixture
def folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Put, Put]]:
    """An AVX-512 processor with bfloat16 products; writers of tables to the user's and the package's empty folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "package")
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    threads = torch.get_num_threads()
    tables.choose_table.cache_clear()

    def put(folder: pathlib.Path) -> Put:
        def write(name: str, **fields: Any) -> pathlib.Path:
            columns = {"columns": tables.COLUMNS, "rows": [ROW]}
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.json"
            path.write_text(json.dumps({"device": HERE, "date": "2026-01-02", **columns, **fields}))
            return path

        return write

    yield put(tables.user_folder()), put(tables.FOLDER)
    tables.choose_table.cache_clear()
    torch.set_num_threads(threads)


def chosen(threads: int, device_type: str = "cpu") -> tables.Table | None:
    tables.choose_table.cache_clear()
    return tables.choose_table(device_type, threads).table


def path_of(threads: int) -> pathlib.Path | None:
    table = chosen(threads)
    return None if table is None else table.path


def described(threads: int) -> str:
    torch.set_num_threads(threads)
    tables.choose_table.cache_clear()
    return tables.describe("cpu")


def test_the_nearest_processor_then_the_nearest_threads_then_the_users_folder(folders: tuple[Put, Put]) -> None:
    """Each added table is a better match for two threads than the previous ones."""
    user, package = folders
    assert chosen(2) is None
    for put, name, fields in (
        (package, "cpu-avx512-amx", {"device": "cpu-avx512-amx", "threads": 2}),
        (package, "cpu-avx2", {"device": "cpu-avx2", "threads": 8}),
        (user, "from-another-machine", {"device": "cpu-avx2", "threads": 8}),
        (user, "from-another-machine-2", {"device": "cpu-avx2", "threads": 2}),
        (package, "cpu-avx512", {"device": "cpu-avx512", "threads": 16}),
        (package, f"{HERE}-t8", {"threads": 8}),
        (package, HERE, {}),  # without its threads, it was measured with one
        (user, f"{HERE}-t1", {"threads": 1}),
        (package, f"{HERE}-t2", {"threads": 2}),
        (user, f"{HERE}-t2", {"threads": 2}),
    ):
        assert put(name, **fields) == path_of(2)
    assert path_of(1) == tables.user_folder() / f"{HERE}-t1.json"
    assert path_of(6) == tables.FOLDER / f"{HERE}-t8.json"
    assert tables.read_table(tables.FOLDER / f"{HERE}.json", "cpu").threads == 1


def test_processors_of_other_architectures_and_gpus_do_not_share_tables(
    folders: tuple[Put, Put], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of one compute capability do, and those of a class, with tilings that fit."""
    _, package = folders
    package(HERE)
    package("nvidia-l4", device="NVIDIA L4", capability="8.9")
    package("nvidia-unknown", device="NVIDIA Unknown")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    monkeypatch.setattr(processor, "flags", frozenset)
    assert chosen(1) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert chosen(1, "cuda") is None
    large, small = [[size, *ROW[1:-2], "bfloat16", "tiled m64 n128 k128 s1 p4"] for size in (16, 32)]
    small[-1] = "tiled m16 n128 k128 s1 p2"
    package("nvidia-a100", device="NVIDIA A100", capability="8.0", rows=[large, small])
    tables.choose_table.cache_clear()
    found = chosen(1, "cuda")
    assert found is not None and found.device == "NVIDIA A100" and len(tables.table_for("cuda")) == 2
    with monkeypatch.context() as least:
        least.setitem(tiling.SHARED_BYTES, (9, 0), tiling.LEAST_SHARED)
        tables.choose_table.cache_clear()
        assert list(tables.table_for("cuda").values()) == [small[-1]]
    tables.choose_table.cache_clear()
    package("nvidia-h100", device="NVIDIA H100", capability="9.0", rows=[[*ROW[:-1], "tiled"]])
    found = chosen(64, "cuda")  # independent of the host's threads
    assert found is not None and found.device == "NVIDIA H100" and found.rows[0][0].device_type == "cuda"
    assert tables.describe("cuda") == (
        "no table for this processor (NVIDIA H200); using the nearest, NVIDIA H100 (packaged, measured on 2026-01-02); "
        "run `vlora tune --device cuda`"
    )
    path = tables.path_for("cuda", 1)
    assert path.name == "nvidia-h200.json"
    tables.write(path, "cuda", "2026-01-03", [])
    assert tables.read_table(path, "cuda")[1:] == ("NVIDIA H200", torch.get_num_threads(), "2026-01-03", [], "9.0")
    found = chosen(1, "cuda")
    assert found is not None and found.path == path and tables.describe("cuda").startswith("NVIDIA H200 (tuned here")
    assert tables.read_table(package(HERE), "cpu").capability is None


def test_the_line_at_start_names_the_table_and_the_remedy(folders: tuple[Put, Put]) -> None:
    user, package = folders
    none, tune = f"no table for this processor ({HERE});", "run `vlora tune`"
    assert described(1) == f"{none} strategies are chosen by rule; {tune}"
    package("cpu-avx512-amx", device="cpu-avx512-amx", threads=1)
    facts = "packaged, measured on 2026-01-02, 1 thread"
    assert described(1) == f"{none} using the nearest, cpu-avx512-amx ({facts}); {tune}"
    package(HERE, threads=1)
    assert described(1) == f"{HERE} ({facts})"
    assert described(2) == f"no table for 2 threads; using {HERE} ({facts}); {tune}"
    user(f"{HERE}-t2", threads=2)
    assert described(2) == f"{HERE} (tuned here on 2026-01-02, 2 threads)"


@pytest.mark.usefixtures("plain")
def test_the_choice_follows_the_number_of_threads(folders: tuple[Put, Put]) -> None:
    stats = stats_of({"a": 4, "b": 4}, HALVES)
    bucket = Bucket.of(stats)
    row = [*bucket[:6], bucket.evenness.name, "float32"]
    for threads, strategy in ((1, "loop"), (2, "stacked")):
        folders[0](f"t{threads}", threads=threads, rows=[[*row, strategy]])
    for threads, strategy in ((1, "loop"), (2, "stacked"), (1, "loop")):
        torch.set_num_threads(threads)
        assert dispatch.choose(stats) == strategy


@pytest.mark.parametrize(
    ("content", "words"),
    (
        ('{"device": "cpu-x", "columns": ["tokens"], "rows": []}', "columns are ('tokens',)"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float32", "fastest"]]}, "fastest"),
        ({"rows": [[1, 1, 8]]}, "of length 9 - at `$.rows[0]`"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float31", "loop"]]}, "float31"),
        ({"rows": [[-1, 1, 8, 64, 64, 1, "EVEN", "float32", "loop"]]}, "is not a bucket"),
        ({"rows": [[1, 1.5, 8, 64, 64, 1, "EVEN", "float32", "loop"]]}, "`float` - at `$.rows[0][1]`"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "int8", "loop"]]}, "is not a bucket"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float32", ["loop"]]]}, "at `$.rows[0][8]`"),
        ({"device": 3}, "`int` - at `$.device`"),
        ({"threads": "two"}, "`str` - at `$.threads`"),
        ({"threads": True}, "`bool` - at `$.threads`"),
        ({"capability": 9.0}, "`float` - at `$.capability`"),
        ('{"rows": []}', "missing required field"),
        ("[]", "Expected `object`"),
        ("{", "truncated"),
        ("[" * 100_000, "object"),
        (b"\xff\xfe", "malformed"),
        (None, "Is a directory"),
    ),
    ids=lambda value: str(value)[:60],
)
def test_a_broken_file_is_skipped_with_one_line(
    content: Any, words: str, folders: tuple[Put, Put], caplog: pytest.LogCaptureFixture
) -> None:
    user, package = folders
    packaged = package(HERE)
    broken = user("broken", **(content if isinstance(content, dict) else {}))
    if content is None:
        broken.unlink()
        broken.mkdir()
    elif not isinstance(content, dict):
        broken.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ValueError, OSError)) as refused:
        tables.read_table(broken, "cpu")
    assert words in str(refused.value) and (content is None or "is not a table of this version" in str(refused.value))
    with caplog.at_level(logging.WARNING, logger="atmm.tuning.tables"):
        tables.choose_table.cache_clear()
        for _ in range(3):
            table = tables.choose_table("cpu", 1).table
            assert table is not None and table.path == packaged
    (record,) = caplog.records
    assert str(broken) in record.getMessage()


def test_rows_that_no_request_can_use_are_skipped(folders: tuple[Put, Put]) -> None:
    names = "grouped m64 n64 k32 s5", "loop", "stacked", "tiled", OWN
    path = folders[0]("other", rows=[[*ROW[:-1], name] for name in names])
    for device_type, served in (("cpu", names[1:]), ("cuda", names[3:])):
        assert tuple(strategy for _, strategy in tables.read_table(path, device_type).rows) == served


def test_a_table_is_read_as_it_was_written(folders: tuple[Put, Put], tmp_path: pathlib.Path) -> None:
    rows = [
        (Bucket(4, 4, 16, 1024, 2048, 3, Evenness.EVEN, torch.bfloat16, "cpu"), "gathered"),
        (Bucket(256, 1, 64, 1024, 1024, 1, Evenness.SINGLE, torch.float32, "cpu"), "loop"),
    ]
    path = tables.path_for("cpu", torch.get_num_threads())
    assert path.parent == tmp_path / "data" / "vlora" / "tables"
    tables.write(path, "cpu", "2026-01-01", rows)
    assert {"device", "torch", "threads", "date", "columns", "rows"} == set(json.loads(path.read_text()))
    tables.choose_table.cache_clear()
    assert tables.table_for("cpu") == dict(rows)


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


# -- kernels that are compiled ahead ----------------------------------------------------------------------------------

OWN = "tiled m128 n256 k64 s1 p4"


def launched(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[Bucket, str]]) -> dict[int, set[str | None]]:
    """The strategies that are launched ahead with this table, by the inputs of the sites."""
    table = tables.Table(pathlib.Path("table.json"), "GPU", 1, "", rows)
    monkeypatch.setattr(tables, "choose_table", lambda device_type, threads: tables.Choice(table, {}))
    found: dict[int, set[str | None]] = {}

    def launch(y: torch.Tensor, x: torch.Tensor, group: Any, plan: SegmentPlan) -> None:
        found.setdefault(x.shape[1], set()).add(plan.strategy)

    monkeypatch.setattr(atmm.warmup, "add_deltas", launch)
    groups = [make_group({}, d_in=d_in, d_outs=(64, 32)) for d_in in (112, 128, 256)]
    compile_ahead(groups, torch.float32, torch.device("cpu"))
    return found


def test_tilings_of_the_rule_and_of_the_table_are_compiled_for_their_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket has rounded sizes: 128 stands for 112 as well."""
    rule = {tiling.name for tiling in all_usual(4)}
    assert len(rule) > 3
    assert launched(monkeypatch, []) == {112: rule, 128: rule, 256: rule}
    bucket = Bucket(16, 2, 16, 128, 128, 2, Evenness.EVEN, torch.float32, "cuda")
    rows = [
        (bucket, OWN),
        (bucket._replace(tokens=64), "batched"),
        (bucket._replace(num_sites=1), "tiled m64 n64 k64 s1 p2"),
        (bucket._replace(dtype=torch.bfloat16), "tiled m64 n64 k64 s1 p3"),
    ]
    assert launched(monkeypatch, rows) == {112: {*rule, OWN}, 128: {*rule, OWN}, 256: rule}
    monkeypatch.setattr(atmm.warmup, "triton_interprets", lambda: True)
    assert launched(monkeypatch, []) == {}, "the interpreter compiles nothing"
    compile_merges([(2**30, 2**30)], torch.float32, torch.device("meta"))
