"""`vlora bench activated` without training: the table of stored runs, and a report without goals."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from fusion.bench.activated import METHODS
from fusion.bench.result_store import ResultStore
from vlora.cli import cli

DOMAINS = ("digits", "photos", "signs", "actions")


def test_the_table_has_every_domain_by_method(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "activated" / "work", {"commit": "1f" * 20})
    for place, domain in enumerate(DOMAINS):
        for number, method in enumerate(METHODS):
            run = {
                "domain": domain,
                "method": method,
                "test": (place + number) / 10,
                "in words": number / 10,
                "spent": {"cpu s": 1.0},
            }
            store.write(f"{domain}-{number}", run)
    result = CliRunner().invoke(cli, ["bench", "activated", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "activated.json").read_text())
    assert [row["method"] for row in report["rows"]] == list(METHODS) and report["goals"] == []
    last = report["rows"][2]
    assert [last[domain] for domain in DOMAINS] == [0.2, 0.3, 0.4, 0.5] and last["mean"] == 0.35
    assert last["mean in words"] == 0.2 and len(report["runs"]) == 12
    [origin] = report["origins"]
    assert origin["commit"] == "1f" * 20 and len(origin["results"]) == 12
