"""The page of a folder of reports agrees with the reports."""

from __future__ import annotations

import json
from pathlib import Path

from vlora.bench import finish, page
from vlora.bench.report import Goal, Report, environment

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_a_saved_report_is_added_to_the_page(tmp_path: Path) -> None:
    finish(Report("first", [], [Goal("speed, x", 2.5, 2, at_most=False)]), None, tmp_path)
    finish(Report("second", [], [Goal("lost", 3, 0, at_most=True), Goal("late", 0, 0, at_most=True)]), None, tmp_path)
    written = (tmp_path / "README.md").read_text()
    assert written == page(tmp_path)
    assert written.index("## first: ") < written.index("| speed, x | 2.5 | >= 2 |") < written.index("## second: ")
    assert "| lost | **3** | <= 0 |" in written
    assert "| late | 0 | <= 0 |" in written


def test_results_of_earlier_runs_are_named(tmp_path: Path) -> None:
    here = {name: environment()[name] for name in ("commit", "machine", "gpu", "versions")}
    found = {"origins": [{**here, "results": ["a"]}, {**here, "commit": "0123456789abcdef", "results": ["b", "c"]}]}
    finish(Report("mixed", [], [Goal("lost", 0, 0, at_most=True)], found=found), None, tmp_path)
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("Measured before")]
    assert lines == [f"Measured before, at commit 0123456789ab, {here['gpu'] or here['machine']}: b, c."]


def test_reports_without_goals_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {"base_s": 0.1}}))
    finish(Report("costs", [], []), None, tmp_path / "other")
    assert "##" not in page(tmp_path)
    assert "##" not in page(tmp_path / "other")


def test_the_published_page_agrees_with_the_published_results() -> None:
    assert (RESULTS / "README.md").read_text() == page(RESULTS), (
        'write it again: python -c "from pathlib import Path; from vlora.bench import write_page; '
        "write_page(Path('docs/results'))\""
    )
