"""`vlora tune`: a table from a search, its check, and a resumed search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import atmm.tuning.search
from atmm.tuning import tables
from fusion.embedded import checkpoint_path
from vlora.cli import cli
from vlora.errors import BadConfig
from vlora.tune import shapes_of

SEARCH = ("--model", "embedded", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _one_small_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(atmm.tuning.search, "TOKENS", (1, 8))
    monkeypatch.setattr(atmm.tuning.search, "ADAPTERS", (2,))
    monkeypatch.setattr(atmm.tuning.search, "RANKS", (8,))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tune(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["tune", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_search_resumes_and_writes_a_valid_table(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "here.json"
    search = (*SEARCH, "--threads", "1", "--out", str(out))
    code, output = tune(*search, "--minutes", "0")
    assert code == 0 and "0 of 8 cases" in output and "run the same command to continue" in output
    code, output = tune(*search, "--minutes", "0", "--json")
    facts = {"table": str(out), "num_measured": 0, "num_rows": 0, "num_done": 0, "num_cases": 8}
    assert code == 0 and json.loads(output.splitlines()[-1]) == facts
    assert list(out.parent.glob("*.partial"))
    # Four groups of sites, eight tokens of two adapters, even and ragged.
    code, output = tune(*search)
    assert code == 0 and "8 buckets measured" in output and not list(out.parent.glob("*.partial"))
    document = json.loads(out.read_text())
    assert document["threads"] == 1 and document["torch"] == torch.__version__
    code, output = tune("--check", "--out", str(out))
    assert code == 0 and "agree with float64" in output
    code, output = tune("--check", "--out", str(out), "--json")
    assert code == 0 and json.loads(output) == {"sound": True, "told": [json.loads(output)["told"][0]]}
    # Rows of other shapes are kept.
    row = [64, 4, 16, 4096, 4096, 1, "EVEN", "float32", "loop"]
    out.write_text(json.dumps({**document, "rows": [*document["rows"], row]}))
    for more in (("--minutes", "0"), ()):
        assert tune(*search, *more)[0] == 0
        assert row in json.loads(out.read_text())["rows"]


def test_the_engine_finds_the_table_of_a_search_by_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    tables.choose_table.cache_clear()
    try:
        torch.set_num_threads(2)
        assert tune(*SEARCH, "--threads", "2", "--minutes", "0")[0] == 0
        written = tmp_path / "vlora" / "tables" / f"{tables.device_name('cpu')}-t2.json"
        assert json.loads(written.read_text())["threads"] == 2
        tables.choose_table.cache_clear()
        table = tables.choose_table("cpu", 2).table
        assert table is not None and table.path == written
        assert "tuned here on" in tables.describe("cpu") and "2 threads" in tables.describe("cpu")
        # Without --out, the table in use is checked.
        _, output = tune("--check", "--threads", "2")
        assert str(written) in output
    finally:
        tables.choose_table.cache_clear()


@pytest.mark.parametrize(("field", "value"), (("threads", 7), ("device", "cpu-other")))
def test_tables_of_other_threads_and_processors_are_not_mixed(tmp_path: Path, field: str, value: object) -> None:
    out = tmp_path / "here.json"
    command = (*SEARCH, "--threads", "1", "--minutes", "0", "--out", str(out))
    assert tune(*command)[0] == 0
    text = json.dumps({**json.loads(out.read_text()), field: value})
    out.write_text(text)
    with pytest.raises(BadConfig, match=rf"measured on .*{value}.*set another --out"):
        CliRunner().invoke(cli, ["tune", *command], catch_exceptions=False)
    assert out.read_text() == text


def test_a_row_with_wrong_results_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "here.json"
    tune(*SEARCH, "--minutes", "0", "--out", str(out))
    document = json.loads(out.read_text())
    document["rows"] = [[8, 2, 8, 64, 64, 1, "EVEN", "float32", "loop"]]
    out.write_text(json.dumps(document))
    monkeypatch.setattr("vlora.tune.error", lambda *_: float("nan"))
    code, output = tune("--check", "--out", str(out))
    assert code == 1 and "loop: Bucket(tokens=8" in output and "0 of 1 rows" in output


def test_shapes_of_a_model_are_its_groups(tmp_path: Path) -> None:
    groups = [(256, (256,)), (256, (256, 256, 256)), (256, (640, 640)), (640, (256,))]
    assert [tuple(shape) for shape in shapes_of(str(checkpoint_path()))] == groups
    with pytest.raises(BadConfig, match="cannot load model"):
        shapes_of(str(tmp_path / "nothing"))
