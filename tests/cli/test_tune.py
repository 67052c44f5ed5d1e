"""`vlora tune`: a table from a search, its check, and a search that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import atmm.search
from vlora.cli import cli
from vlora.errors import BadConfig
from vlora.tune import shapes_of


@pytest.fixture(autouse=True)
def _one_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atmm.search, "TOKENS", (1, 8))
    monkeypatch.setattr(atmm.search, "ADAPTERS", (2,))
    monkeypatch.setattr(atmm.search, "RANKS", (8,))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tune(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["tune", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def embedded() -> str:
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())


def test_a_search_writes_a_table_that_holds(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "here.json"
    code, told = tune("--model", "embedded", "--dtype", "float32", "--out", str(out))
    # Four groups of sites, eight tokens of two adapters, even and ragged.
    assert code == 0 and "8 buckets measured" in told
    assert not out.with_suffix(".partial").exists()
    document = json.loads(out.read_text())
    assert document["threads"] == 1 and document["torch"] == torch.__version__
    code, told = tune("--check", "--out", str(out))
    assert code == 0 and "agree with float64" in told


def test_a_search_out_of_time_says_how_far_it_came_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    asked = ("--model", "embedded", "--dtype", "float32", "--out", str(out))
    code, told = tune(*asked, "--minutes", "0")
    assert code == 0 and "0 of 8 cases" in told and "goes on" in told
    assert out.with_suffix(".partial").exists()
    assert "8 buckets measured" in tune(*asked)[1]


def test_a_search_keeps_the_rows_of_other_shapes(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    row = [64, 4, 16, 4096, 4096, 1, "EVEN", "float32", "loop"]
    tune("--model", "embedded", "--dtype", "float32", "--out", str(out))
    document = json.loads(out.read_text())
    out.write_text(json.dumps({**document, "rows": [*document["rows"], row]}))
    for more in ((), ("--minutes", "0")):
        assert tune("--model", "embedded", "--dtype", "float32", "--out", str(out), *more)[0] == 0
        assert row in json.loads(out.read_text())["rows"]


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match=r"cannot write the table .*here\.json.*give --out"):
        CliRunner().invoke(
            cli, ["tune", "--minutes", "0", "--out", str(tmp_path / "file" / "here.json")], catch_exceptions=False
        )


@pytest.mark.parametrize("wrong", (("--minutes", "-1"), ("--threads", "0"), ("--dtype", "int8"), ("--device", "tpu")))
def test_what_cannot_be_is_refused_as_it_is_typed(wrong: tuple[str, str]) -> None:
    code, told = tune(*wrong)
    assert code == 2 and wrong[0] in told


def test_a_row_that_computes_something_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "here.json"
    tune("--model", "embedded", "--dtype", "float32", "--out", str(out))
    document = json.loads(out.read_text())
    document["rows"] = [[8, 2, 8, 64, 64, 1, "EVEN", "float32", "loop"]]
    out.write_text(json.dumps(document))
    monkeypatch.setattr("vlora.tune.error", lambda *_: float("nan"))
    code, told = tune("--check", "--out", str(out))
    assert code == 1 and "loop: Bucket(tokens=8" in told and "0 of 1 rows" in told


@pytest.mark.parametrize("text", (None, "{"))
def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    out = tmp_path / "here.json"
    if text is not None:
        out.write_text(text)
    with pytest.raises(BadConfig, match=r"cannot read the table .*here\.json"):
        CliRunner().invoke(cli, ["tune", "--check", "--out", str(out)], catch_exceptions=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadConfig, match="no CUDA device"):
        CliRunner().invoke(cli, ["tune", "--device", "cuda"], catch_exceptions=False)


def test_shapes_of_a_model_are_its_groups() -> None:
    assert [tuple(shape) for shape in shapes_of(embedded())] == [
        (256, (256,)),
        (256, (256, 256, 256)),
        (256, (640, 640)),
        (640, (256,)),
    ]


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot load model"):
        shapes_of(str(tmp_path / "nothing"))
