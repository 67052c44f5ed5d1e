"""The harness of all benchmarks: stored results, jobs, reports; and what all benchmarks have in common."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.bench.reports import MAKERS, STAGE_GOALS, report_of
from tests.processes import is_alive, until
from vlora.bench import harness
from vlora.bench.costs import RANK
from vlora.bench.dummy import (
    MODELS,
    half_billion_config,
    language_shapes,
    model_named,
    served_config,
    small_config,
    small_served_config,
)
from vlora.bench.harness import ORIGIN, Bench, Measured, Store, bench_named, finish, measured, modules, origins
from vlora.bench.report import Goal, Report, environment, page
from vlora.bench.timing import interleaved
from vlora.errors import BadConfig
from vlora.memory.arena import block_pages, pages_for
from vlora.models.families import family_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


# -- stored results ---------------------------------------------------------------------------------------------------

CALLS: list[str] = []


def measure(case: str) -> Measured:
    CALLS.append(case)
    if case == "stop" and CALLS.count("stop") == 1:
        raise KeyboardInterrupt
    return Measured([{"case": case}], {"last": case}, [Goal(case, 1, 1, True)])


def a_bench(*cases: str, **settings: Any) -> Bench:
    return Bench(name="some", cases=lambda quick: {name: name for name in cases}, measure=measure, **settings)


def test_an_interrupted_run_continues_and_a_complete_one_begins_again(tmp_path: Path) -> None:
    CALLS.clear()
    bench = a_bench("a", "stop", "b")
    with pytest.raises(KeyboardInterrupt):
        measured(bench, False, tmp_path)
    report = measured(bench, False, tmp_path)
    assert CALLS == ["a", "stop", "stop", "b"]
    assert [row["case"] for row in report.rows] == ["a", "stop", "b"] and report.found["last"] == "a"
    assert [goal.name for goal in report.goals] == ["a", "stop", "b"] and not (tmp_path / "some").exists()
    measured(bench, False, tmp_path)
    assert CALLS[4:] == ["a", "stop", "b"]


def test_lasting_results_are_used_on_another_commit_which_the_report_says(tmp_path: Path) -> None:
    CALLS.clear()
    folder = tmp_path / "some" / "work"
    for bench, expected in ((a_bench("a", "b", same=()), ["b"]), (a_bench("a", "b"), ["a"])):
        Store(folder, {"commit": "1f" * 20}).write("a", {**measure("a")._asdict(), "spent": {"wall s": 1}})
        CALLS.clear()
        report = measured(bench, False, tmp_path)
        assert expected == CALLS
        if bench.same == ():
            assert [origin["results"] for origin in report.found["origins"]] == [["a"], ["b"]]
            assert report.found["origins"][0]["commit"] == "1f" * 20
    CALLS.clear()
    measured(a_bench("a", same=()), True, tmp_path)  # quick ones have a folder of their own
    assert CALLS == ["a"] and (tmp_path / "some" / "quick" / "a.json").exists()


def test_a_broken_file_is_no_result(tmp_path: Path) -> None:
    store = Store(tmp_path, {"commit": "abc"}, same=ORIGIN)
    assert store.value("v-lora:fig1/a", lambda: {"ms": (1.5, 2)}) == {"ms": [1.5, 2]}, "as a later run reads it"
    assert store.value("v-lora:fig1/a", pytest.fail) == {"ms": [1.5, 2]}
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:-5])
    assert store.value("v-lora:fig1/a", lambda: 3) == 3
    assert Store(tmp_path, {"commit": "def"}, same=ORIGIN).read("v-lora:fig1/a") is None
    assert [each["results"] for each in origins({name: store.write(name, {}) for name in "ab"})] == [["a", "b"]]


# -- jobs -------------------------------------------------------------------------------------------------------------


def job(case: tuple[str, str]) -> Measured:
    folder, name = case
    (Path(folder) / f"{name}.pid").write_text(str(os.getpid()))
    if name == "fails":
        sys.exit(3)
    if name == "waits":
        time.sleep(600)
    return Measured([{"case": name}])


def jobs(folder: Path, *names: str) -> Bench:
    return Bench(name="jobs", cases=lambda quick: {n: (str(folder), n) for n in names}, measure=job, jobs=True)


def alive_jobs(folder: Path) -> list[int]:
    return [pid for file in folder.glob("*.pid") if is_alive(pid := int(file.read_text()))]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    report = measured(jobs(tmp_path, "one", "two"), False, tmp_path)
    assert [row["case"] for row in report.rows] == ["one", "two"]
    with pytest.raises(RuntimeError, match="the job fails ended with exit code 3"):
        measured(jobs(tmp_path, "waits", "fails"), False, tmp_path)
    assert not alive_jobs(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # for a busy machine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_job_outlives_the_bench(tmp_path: Path, number: signal.Signals) -> None:
    code = f"from tests.bench.test_harness import *; measured(jobs(Path({str(tmp_path)!r}), 'waits'), False, None)"
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n    exec({code!r})"]
    bench = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(alive_jobs(tmp_path)), 240)  # each process imports torch
        (os.killpg if number == signal.SIGINT else os.kill)(bench.pid, number)
        assert bench.wait(30) != 0
        until(lambda: not alive_jobs(tmp_path))
    finally:
        os.killpg(bench.pid, signal.SIGKILL) if bench.poll() is None else None


# -- reports ----------------------------------------------------------------------------------------------------------


def test_saved_reports_are_on_the_page_with_the_origins_of_their_results(tmp_path: Path) -> None:
    bench = a_bench()

    def save(name: str, *goals: Goal, folder: Path = tmp_path, **found: Any) -> None:
        folder.mkdir(exist_ok=True)
        finish(bench, Report(name, [], goals, found=found), folder)

    save("first", Goal("speed, x", 2.5, 2, at_most=False))
    save("second", Goal("lost", 3, 0, at_most=True), Goal("late", 0, 0, at_most=True))
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {"base_s": 0.1}}))  # without goals
    written = (tmp_path / "README.md").read_text()
    assert written == page(tmp_path)
    assert written.index("## first: ") < written.index("| speed, x | 2.5 | >= 2 |") < written.index("## second: ")
    assert "| lost | **3** | <= 0 |" in written and "| late | 0 | <= 0 |" in written
    here = {name: environment()[name] for name in ("commit", "machine", "gpu", "versions")}
    mixed = [{**here, "results": ["a"]}, {**here, "commit": "0123456789abcdef", "results": ["b", "c"]}]
    save("mixed", Goal("lost", 0, 0, at_most=True), origins=mixed)
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("Measured before")]
    assert lines == [
        f"Measured before, at commit 0123456789ab (not in this repository), {here['gpu'] or here['machine']}: b, c."
    ]
    save("no goals", folder=tmp_path / "other")
    assert "##" not in page(tmp_path / "other")


def test_all_continues_after_the_reports_of_this_commit_and_keeps_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLS.clear()
    benches = {name: dataclasses.replace(a_bench(*cases), name=name) for name, cases in {"x": "a", "y": "bc"}.items()}
    monkeypatch.setattr(harness, "modules", lambda: dict.fromkeys(benches))
    monkeypatch.setattr(harness, "bench_named", benches.get)
    assert harness.run("all", out=tmp_path) and CALLS == ["a", "b", "c"]
    (tmp_path / "y.json").unlink()
    assert harness.run("all", out=tmp_path) and CALLS[3:] == ["b", "c"], "x has a report of this commit"
    assert harness.run("x", out=tmp_path) and CALLS[5:] == ["a"], "one benchmark is always measured"
    missed = json.loads((tmp_path / "x.json").read_text())
    missed["goals"][0]["holds"] = False
    (tmp_path / "x.json").write_text(json.dumps(missed))
    assert not harness.run("all", out=tmp_path) and CALLS[6:] == []
    missed["env"]["commit"] = "1f" * 20
    (tmp_path / "x.json").write_text(json.dumps(missed))
    assert harness.run("all", out=tmp_path) and CALLS[6:] == ["a"], "a report of another commit does not count"
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["a", "b", "c", "b", "c", "a", "a"]
    assert all(line["commit"] and line["load"] >= 0 and line["wall s"] >= 0 for line in lines)


def without_ages(text: str) -> str:
    """A page without how far its commits are behind, which the next commit changes and a shallow clone cannot know."""
    return re.sub(r" \((\d+ commits behind HEAD|not in this repository)\)", "", text)


def test_the_published_page_agrees_with_the_published_results() -> None:
    assert without_ages((RESULTS / "README.md").read_text()) == without_ages(page(RESULTS)), (
        'write it again: python -c "from pathlib import Path; from vlora.bench.report import page; '
        "Path('docs/results/README.md').write_text(page(Path('docs/results')))\""
    )


@pytest.mark.parametrize(
    ("value", "at_most", "holds"),
    (
        (0.9, True, True),
        (1.0, True, True),
        (1.1, True, False),
        (0.9, False, False),
        (1.0, False, True),
        (1.1, False, True),
    ),
)
def test_a_goal_is_an_upper_or_a_lower_bound(value: float, at_most: bool, holds: bool) -> None:
    goal = Goal("a ratio", value, 1.0, at_most)
    assert goal.holds is holds
    stated = f"{'<=' if at_most else '>='} 1"
    assert goal.as_dict() == {"name": "a ratio", "value": value, "goal": stated, "holds": holds}
    assert not Goal("not measured", float("nan"), 1.0, at_most).holds


@pytest.mark.parametrize("kept", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_published_goals_follow_from_their_values(kept: Path) -> None:
    found = json.loads(kept.read_text())
    for goal in found.get("goals", ()):
        sign, bound = goal["goal"].split()
        at_most = {"<=": True, ">=": False}[sign]
        rounding = 5e-5 + 1e-5 * abs(float(bound))  # values and bounds are rounded in the file
        near = abs(goal["value"] - float(bound)) <= rounding
        assert near or goal["holds"] == Goal("", goal["value"], float(bound), at_most).holds, goal
    if "env" in found:
        assert found["env"]["machine"] and found["env"]["commit"]


# -- rounds of calls, and shapes of models -----------------------------------------------------------------------------


@pytest.mark.parametrize(("limit_s", "rounds"), [(math.inf, 4), (100.0, 4), (6.0, 2), (2.0, 1), (0.0, 1)])
def test_no_round_begins_after_the_limit_but_one_counts(limit_s: float, rounds: int) -> None:
    now, calls = [0.0], []

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    candidates = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}
    found = interleaved(candidates, 4, warmup=1, clock=lambda: now[0], limit_s=limit_s)
    assert found == {"a": [1.0] * rounds, "b": [2.0] * rounds}
    assert calls == ["a", "b"] * (1 + rounds)
    now[0] = 0.0  # a long warm-up is cut short
    assert interleaved({"a": lambda: call("a", 5.0)}, 9, warmup=3, clock=lambda: now[0], limit_s=4.0) == {"a": [5.0]}
    assert now[0] == 10.0


def built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def millions(module: Any) -> float:
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "whole", "tower"), [("qwen2-0.5b", 592, 98), ("qwen2-vl-7b", 8290, 676), ("llava-13b", 13350, 304)]
)
def test_models_have_their_shapes_and_arenas_their_capacity(name: str, whole: float, tower: float) -> None:
    model = model_named(name)
    config = model.config()
    family_of(config)
    made = built(config)
    own_tower = made.model.vision_tower if name == "llava-13b" else made.model.visual
    assert (millions(made), millions(own_tower)) == pytest.approx((whole, tower), rel=0.01)
    shapes, text = language_shapes(made), config.text_config
    assert len(shapes) == 7 * text.num_hidden_layers
    adapter = pages_for(sum(2 * RANK * (d_out + d_in) for d_out, d_in in shapes.values()))
    kv_dim = text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    requests = 128 * 3 * block_pages(text.num_hidden_layers, 16, kv_dim, torch.bfloat16)  # at most 45 tokens each
    pages = model.arena_bytes // 2**16
    assert 8 * adapter <= pages // 2 and requests <= pages // 2
    with pytest.raises(BadConfig, match="no model named 'gpt'.*" + ", ".join(MODELS)):
        model_named("gpt")


@pytest.mark.parametrize(
    ("config", "whole", "tower"),
    [
        (half_billion_config(), 592, 98),
        (half_billion_config(vision="none"), 494, 0.4),
        (half_billion_config(8), 297, 41.4),
        (small_config(), 6.0, 0.94),
        (small_config("none"), 5.2, 0.25),
        (served_config(), 515, 98),
        (small_served_config(), 10.9, 0.94),
    ],
)
def test_towers_have_their_family_shape_or_negligible_cost(config: Any, whole: float, tower: float) -> None:
    made = built(config)
    assert (millions(made), millions(made.model.visual)) == pytest.approx((whole, tower), rel=0.05)


# -- all benchmarks ---------------------------------------------------------------------------------------------------


def check_goals(met: Sequence[Goal], missed: Sequence[Goal]) -> None:
    assert [goal.name for goal in met if not goal.holds] == []
    assert [goal.name for goal in missed if goal.holds] == [], "a goal that cannot fail"
    assert met and len(missed) == len(met) == len({goal.name for goal in met})


@pytest.mark.parametrize("stage", STAGE_GOALS)
def test_goals_of_stages_for_a_gpu_hold_for_measurements_that_meet_them_and_for_no_others(stage: str) -> None:
    check_goals(STAGE_GOALS[stage](1.0), STAGE_GOALS[stage](100.0))


@pytest.mark.parametrize("name", modules())
def test_goals_hold_for_measurements_that_meet_them_and_for_no_others(name: str, tmp_path: Path) -> None:
    """An inverted ratio, a goal that cannot fail, and a picture that cannot be drawn from the rows are noticed."""
    bench = bench_named(name)
    assert bench.name == name
    assert name in MAKERS, "add a maker of reports with replaced measurements to `MAKERS`, tests/bench/reports.py"
    met, missed = (report_of(name, slow) for slow in (1.0, 100.0))
    assert met.bench == name
    check_goals(met.goals, missed.goals)
    assert json.loads(json.dumps(met.as_dict(), default=str))["goals"][0]["holds"] is True
    for file, picture in bench.pictures(met.rows).items() if bench.pictures else ():
        picture.save(tmp_path / f"{file}.png")
        assert (tmp_path / f"{file}.png").read_bytes().startswith(b"\x89PNG"), f"{file} has no rows"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(set(modules()) - {"paper"}))
def test_a_quick_run_ends_with_a_line_of_json(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vlora.cli", "bench", name, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # goals of quick runs on a loaded machine
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / f"{name}.json").read_text())
    assert report["bench"] == name and report["rows"] and {"env", "goals"} <= report.keys()
    drawn = bench_named(name).pictures
    assert {file.stem for file in (tmp_path / name).glob("*.png")} <= set(drawn(report["rows"]) if drawn else ())


def test_an_installation_without_a_checkout_names_its_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "modules", lambda: harness.BENCHES)
    with pytest.raises(BadConfig, match=r"choose one of step, costs, serve, tp or all; a checkout .* has more"):
        bench_named("streams")
    assert set(MAKERS) == set(modules())
