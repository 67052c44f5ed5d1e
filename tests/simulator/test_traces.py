"""Recorded traffic: parsing, and reports of invalid lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.errors import BadConfig
from vlora.simulator import Arrival, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def trace(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "trace.csv"


def test_azure_traces_are_read_with_relative_times(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,110,27")
    first, second = read_trace(path, 1, 0)
    assert first == Arrival(0.0, "adapter-0", 4808, 10)
    assert second.time_s == pytest.approx(0.5) and second[2:7] == (110, 27, None, 0, None)


def test_named_adapters_are_kept_and_others_drawn_reproducibly(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + ",Adapter", "5,10,0,gate", "5.5,10,3,")
    assert list(read_trace(path, 9, 0)) == [Arrival(0.0, "gate", 10, 0), Arrival(0.5, None, 10, 3)]
    path = trace(tmp_path, HEADER, *(f"{i},10,3" for i in range(50)))
    drawn = list(read_trace(path, 9, 0))
    assert drawn == list(read_trace(path, 9, 0)) and len({a.adapter for a in drawn}) > 3


def test_optional_columns_are_read(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + ",Adapter,MaxTTFT,Priority,Tenant", "5,10,3,gate,0.5,-2,north", "6,10,3,gate,,,")
    assert [arrival[4:7] for arrival in read_trace(path, 1, 0)] == [(0.5, -2, "north"), (None, 0, None)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["TIMESTAMP,ContextTokens", "1,2"], "line 1: no column GeneratedTokens"),
        ([HEADER, "1,2,3", "soon,2,3"], "line 3, field TIMESTAMP: 'soon'"),
        ([HEADER, "5,2,3", "4,2,3"], "line 3, field TIMESTAMP: '4' is earlier"),
        ([HEADER, "1,0,3"], "line 2, field ContextTokens: '0'"),
        ([HEADER, "1,2,-3"], "line 2, field GeneratedTokens: '-3'"),
        ([HEADER, "1,2"], "line 2, field GeneratedTokens: None"),
        ([HEADER + ",MaxTTFT", "1,2,3,0"], "line 2, field MaxTTFT: '0' is not above 0"),
        ([HEADER + ",MaxTTFT", "1,2,3,soon"], "line 2, field MaxTTFT: 'soon'"),
        ([HEADER + ",Priority", "1,2,3,11"], "line 2, field Priority: '11'"),
        ([HEADER + ",Priority", "1,2,3,0.5"], "line 2, field Priority: '0.5'"),
        ([HEADER + ",Adapter", "1,2,0,"], "line 2, field GeneratedTokens: 0 requests a task head"),
    ],
)
def test_an_invalid_line_is_reported_with_its_field(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        list(read_trace(trace(tmp_path, *lines), 1, 0))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="No such file"):
        list(read_trace(tmp_path / "none.csv", 1, 0))
