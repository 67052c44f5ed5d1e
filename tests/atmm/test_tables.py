"""Selection of a measured table among the user's and the packaged ones, by processor and threads; broken files."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atmm import SegmentPlan, dispatch, processor
from atmm.batch_stats import BatchStats
from atmm.tuning import tables
from atmm.tuning.buckets import Bucket
from tests.atmm.cases import make_group, segments

ROW = [4, 4, 16, 1024, 2048, 1, "EVEN", "float32", "gathered"]

Put = Callable[..., pathlib.Path]


@pytest.fixture(autouse=True)
def folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An AVX-512 processor with bfloat16 products, and empty folders of tables."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "package")
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    threads = torch.get_num_threads()
    tables.choose_table.cache_clear()
    yield
    tables.choose_table.cache_clear()
    torch.set_num_threads(threads)


@pytest.fixture
def user() -> Put:
    return lambda name, **fields: _put(tables.user_folder(), name, **fields)


@pytest.fixture
def package() -> Put:
    return lambda name, **fields: _put(tables.FOLDER, name, **fields)


def _put(folder: pathlib.Path, name: str, **fields: Any) -> pathlib.Path:
    document = {"device": "cpu-avx512-bf16", "date": "2026-01-02", "columns": tables.COLUMNS, "rows": [ROW], **fields}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def chosen(threads: int) -> pathlib.Path | None:
    tables.choose_table.cache_clear()
    table = tables.choose_table("cpu", threads).table
    return None if table is None else table.path


def described(threads: int) -> str:
    torch.set_num_threads(threads)
    tables.choose_table.cache_clear()
    return tables.describe("cpu")


def test_the_nearest_processor_then_the_nearest_threads_then_the_users_folder(user: Put, package: Put) -> None:
    """Each added table is a better match for two threads than the previous ones."""
    assert chosen(2) is None
    for add in (
        lambda: package("cpu-avx512-amx", device="cpu-avx512-amx", threads=2),
        lambda: package("cpu-avx2", device="cpu-avx2", threads=8),
        lambda: user("from-another-machine", device="cpu-avx2", threads=8),
        lambda: user("from-another-machine-2", device="cpu-avx2", threads=2),
        lambda: package("cpu-avx512", device="cpu-avx512", threads=16),
        lambda: package("cpu-avx512-bf16-t8", threads=8),
        lambda: package("cpu-avx512-bf16", threads=1),
        lambda: user("cpu-avx512-bf16-t1", threads=1),
        lambda: package("cpu-avx512-bf16-t2", threads=2),
        lambda: user("cpu-avx512-bf16-t2", threads=2),
    ):
        best = add()
        assert chosen(2) == best
    assert chosen(1) == tables.user_folder() / "cpu-avx512-bf16-t1.json"
    assert chosen(6) == tables.FOLDER / "cpu-avx512-bf16-t8.json"


def test_a_table_without_its_threads_was_measured_with_one(user: Put, package: Put) -> None:
    one, eight = package("old"), user("t8", threads=8)
    assert tables.read_table(one, "cpu").threads == 1
    assert chosen(1) == chosen(2) == one
    assert chosen(8) == eight


def test_processors_of_other_architectures_and_gpus_do_not_share_tables(
    package: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("cpu-avx512-bf16")
    package("nvidia-one", device="NVIDIA One")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    monkeypatch.setattr(processor, "flags", frozenset)
    assert chosen(1) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Other")
    assert tables.choose_table("cuda", 1).table is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA One")
    tables.choose_table.cache_clear()
    table = tables.choose_table("cuda", 64).table  # independent of the host's threads
    assert table is not None and table.rows[0][0].device_type == "cuda"
    assert tables.describe("cuda") == "NVIDIA One (packaged, measured on 2026-01-02)"


def test_gpus_of_one_compute_capability_share_tables(package: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen_gpu() -> str | None:
        tables.choose_table.cache_clear()
        table = tables.choose_table("cuda", 1).table
        return None if table is None else table.device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    package("a-cpu")
    package("nvidia-a100", device="NVIDIA A100", capability="8.0")
    package("nvidia-unknown", device="NVIDIA Unknown")
    assert chosen_gpu() is None
    package("nvidia-h100", device="NVIDIA H100", capability="9.0")
    assert chosen_gpu() == "NVIDIA H100"
    assert tables.describe("cuda") == (
        "no table for this processor (NVIDIA H200); using the nearest, NVIDIA H100 (packaged, measured on 2026-01-02); "
        "run `vlora tune --device cuda`"
    )
    path = tables.path_for("cuda", 1)
    assert path.name == "nvidia-h200.json"
    tables.write(path, "cuda", "2026-01-03", [])
    written = tables.read_table(path, "cuda")
    assert (written.device, written.capability) == ("NVIDIA H200", "9.0")
    assert chosen_gpu() == "NVIDIA H200"
    assert tables.read_table(package("a-cpu"), "cpu").capability is None
    with pytest.raises(ValueError, match=r"capability is 9\.0"):
        tables.read_table(package("broken", capability=9.0), "cuda")


def test_the_line_at_start_names_the_table_and_the_remedy(user: Put, package: Put) -> None:
    here = "cpu-avx512-bf16"
    assert described(1) == (f"no table for this processor ({here}); strategies are chosen by rule; run `vlora tune`")
    package("cpu-avx512-amx", device="cpu-avx512-amx", threads=1)
    assert described(1) == (
        f"no table for this processor ({here}); using the nearest, cpu-avx512-amx "
        "(packaged, measured on 2026-01-02, 1 thread); run `vlora tune`"
    )
    package("cpu-avx512-bf16", threads=1)
    assert described(1) == f"{here} (packaged, measured on 2026-01-02, 1 thread)"
    assert described(2) == (
        f"no table for 2 threads; using {here} (packaged, measured on 2026-01-02, 1 thread); run `vlora tune`"
    )
    user("cpu-avx512-bf16-t2", threads=2)
    assert described(2) == f"{here} (tuned here on 2026-01-02, 2 threads)"


@pytest.mark.usefixtures("folders")
def test_the_choice_follows_the_number_of_threads(user: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "serves", lambda device, dtype: False)
    group = make_group({"a": 4, "b": 4})
    group.pack("ab")
    assert group.packed is not None
    stats = BatchStats(SegmentPlan(6, segments({"a": 3, "b": 3})), group.packed.layout)
    bucket = Bucket.of(stats)
    row = [*bucket[:6], bucket.evenness.name, "float32"]
    for threads, strategy in ((1, "loop"), (2, "stacked")):
        user(f"t{threads}", threads=threads, rows=[[*row, strategy]])
    for threads, strategy in ((1, "loop"), (2, "stacked"), (1, "loop")):
        torch.set_num_threads(threads)
        assert dispatch.choose(stats) == strategy


@pytest.mark.parametrize(
    ("content", "words"),
    (
        ('{"device": "cpu-x", "columns": ["tokens"], "rows": []}', "columns"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float32", "fastest"]]}, "fastest"),
        ({"rows": [[1, 1, 8]]}, "unpack"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float31", "loop"]]}, "float31"),
        ({"rows": [[-1, 1, 8, 64, 64, 1, "EVEN", "float32", "loop"]]}, "tokens is -1"),
        ({"rows": [[1, 1, 8, 64, 64, 1, "EVEN", "float32", ["loop"]]]}, "unhashable"),
        ({"device": 3}, "device is 3"),
        ({"threads": "two"}, "threads is 'two'"),
        ({"threads": True}, "threads is True"),
        ('{"rows": []}', "columns"),
        ("[]", "list"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        (b"\xff\xfe", "decode"),
    ),
    ids=lambda value: str(value)[:60],
)
def test_a_broken_file_is_skipped_with_one_line(
    content: Any, words: str, user: Put, package: Put, caplog: pytest.LogCaptureFixture
) -> None:
    packaged = package("cpu-avx512-bf16")
    broken = user("broken", **(content if isinstance(content, dict) else {}))
    if not isinstance(content, dict):
        broken.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="is not a table of this version") as refused:
        tables.read_table(broken, "cpu")
    assert words in str(refused.value)
    with caplog.at_level(logging.WARNING, logger="atmm.tuning.tables"):
        tables.choose_table.cache_clear()
        for _ in range(3):
            table = tables.choose_table("cpu", 1).table
            assert table is not None and table.path == packaged
    (record,) = caplog.records
    assert str(broken) in record.getMessage()


def test_a_table_that_cannot_be_opened_is_skipped(package: Put, caplog: pytest.LogCaptureFixture) -> None:
    packaged = package("cpu-avx512-bf16")
    (tables.user_folder() / "a-folder.json").mkdir(parents=True)
    assert chosen(1) == packaged
    assert "a-folder.json" in caplog.text
