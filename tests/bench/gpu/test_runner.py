"""The order, the box of time, resumption and failures of `vlora gpu-check`, with stages that are not run or fail."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vlora.bench.gpu import runner
from vlora.bench.gpu.runner import STAGES, Stage, chosen
from vlora.bench.report import Goal, page
from vlora.errors import BadConfig

CODE = runner.code_of(STAGES[0])


class Processes:
    """Successful stages that take no time; records which of them ran, and their limits."""

    def __init__(self, *, ok: bool = True) -> None:
        self.ok = ok
        self.ran: dict[str, float] = {}

    def __call__(self, stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int | None, str]:
        self.ran[stage.name] = limit_s
        found = {"stage": stage.name, "ok": self.ok, "device": device, "result": {}, "seconds": 0.0}
        runner.write(out / stage.file_name, {**found, **runner.code_of(stage)})
        return (0 if self.ok else 1), "line 1\nline 2\n"


def run(out: Path, processes: Processes, *, device: str = "cuda", minutes: float = 9.5, names: str = "") -> Any:
    return runner.check(out, device, minutes, chosen(names.split()), lambda line: None, processes)


def test_stages_run_in_order_and_each_has_its_file(tmp_path: Path) -> None:
    processes = Processes()
    outcome = run(tmp_path, processes)
    assert list(processes.ran) == [stage.name for stage in STAGES]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [stage.file_name for stage in STAGES]
    assert not outcome.left
    # Each gets its own limit, or what is left of the box.
    assert processes.ran["facts"] == next(stage.limit_s for stage in STAGES if stage.name == "facts")


def test_stages_that_do_not_fit_are_left_and_shorter_ones_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.time, "monotonic", lambda: 0.0)
    processes = Processes()
    outcome = run(tmp_path, processes, minutes=1.0)  # 55 s
    assert [stage.name for stage in outcome.ran] == ["facts", "smoke", "attention", "merge", "heads", "profile"]
    left = ["oracle", "step", "serve", "policies", "search", "styles", "prefill", "costs"]
    assert [stage.name for stage in outcome.left] == left
    assert max(processes.ran.values()) <= 55


def test_three_calls_of_nine_and_a_half_minutes_cover_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stages that take the time that they are expected to take."""
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    processes = Processes()

    def slow(stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int | None, str]:
        now[0] += stage.needs_s
        return processes(stage, device, out, limit_s)

    calls = []
    for _ in range(3):
        started = now[0]
        outcome = runner.check(tmp_path, "cuda", 9.5, STAGES, lambda line: None, slow)
        calls.append(outcome)
        assert now[0] - started <= 570
    assert not calls[-1].left and sum(len(call.ran) for call in calls) == len(STAGES)


def test_a_later_call_runs_what_failed_or_changed(tmp_path: Path) -> None:
    run(tmp_path, Processes(), names="facts smoke merge")
    run(tmp_path, Processes(ok=False), names="oracle")
    changed = tmp_path / "04-merge.json"
    runner.write(changed, json.loads(changed.read_text()) | {"digest": "another"})
    processes = Processes()
    run(tmp_path, processes, names="facts smoke oracle merge")
    assert list(processes.ran) == ["oracle", "merge"]
    # Results of a CPU are not those of a GPU.
    assert [stage.name for stage in run(tmp_path, Processes(), names="facts", device="cpu").ran] == ["facts"]


def test_a_stage_depends_on_the_files_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {stage.name: runner._sources(stage) for stage in STAGES}  # noqa: SLF001
    for stage in STAGES:
        assert runner.ROOT / f"{stage.module.replace('.', '/')}.py" in by_name[stage.name]
    relative = {name: {str(path.relative_to(runner.ROOT)) for path in found} for name, found in by_name.items()}
    assert "vlora/engine/engine.py" in relative["step"] and "atmm/triton/kernels.py" in relative["step"]
    assert "benchmarks/gpu/merge.py" not in relative["step"] and "tests/conftest.py" in relative["oracle"]
    assert "vlora/engine/engine.py" not in relative["facts"] and "atmm/tuning/search.py" in relative["search"]
    before = {stage.name: runner.code_of(stage)["digest"] for stage in STAGES}
    plain = Path.read_bytes
    changed = runner.ROOT / "benchmarks" / "gpu" / "prefill.py"
    monkeypatch.setattr(Path, "read_bytes", lambda path: plain(path) + b"#" * (path == changed))
    after = {stage.name: runner.code_of(stage)["digest"] for stage in STAGES}
    assert {name for name in before if before[name] != after[name]} == {"prefill", "oracle"}


def test_a_failed_stage_keeps_the_end_of_its_output(tmp_path: Path) -> None:
    run(tmp_path, Processes(ok=False), names="facts")
    found = runner.read(tmp_path / "00-facts.json")
    assert found["output"] == ["line 1", "line 2"] and found["error"]["message"] == "line 2"


@pytest.mark.parametrize(("exit_code", "message"), [(None, "ended at its limit"), (-11, "signal 11 (SIGSEGV)")])
def test_a_process_that_writes_nothing_has_a_record(tmp_path: Path, exit_code: int | None, message: str) -> None:
    runner.check(tmp_path, "cuda", 9.5, STAGES[:1], lambda line: None, lambda *_: (exit_code, "last words"))
    found = runner.read(tmp_path / "00-facts.json")
    assert not found["ok"] and found["output"] == ["last words"]
    assert found["digest"] == CODE["digest"] and found["device"] == "cuda"
    assert message in found["error"]["message"]


def test_a_stage_is_ended_at_its_limit(tmp_path: Path) -> None:
    stage = STAGES[0]._replace(limit_s=0.2)
    runner.check(tmp_path, "cpu", 9.5, [stage], lambda line: None)
    found = runner.read(tmp_path / stage.file_name)
    assert not found["ok"] and found["error"]["message"].startswith("ended at its limit")


@pytest.fixture
def stage_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the stage facts, without `run`, which a test sets."""
    module = ModuleType("vlora.bench.gpu.stages.facts")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_stage_that_raises_leaves_the_results_so_far(tmp_path: Path, stage_module: ModuleType) -> None:
    def fail(context: Any) -> dict[str, Any]:
        context.keep({"rows": [1, 2]})
        raise ValueError("wrong shape")

    def process(stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int, str]:
        with pytest.raises(ValueError) as raised:
            runner.run_stage(stage, device, out, limit_s)
        return 1, "".join(traceback.format_exception(raised.value))

    stage_module.run = fail  # type: ignore[attr-defined]
    runner.check(tmp_path, "cpu", 9.5, STAGES[:1], lambda line: None, process)
    found = runner.read(tmp_path / "00-facts.json")
    assert found["result"] == {"rows": [1, 2]} and not found["ok"]
    assert found["error"]["message"] == found["output"][-1] == "ValueError: wrong shape"
    assert found["env"]["versions"]["torch"] and found["commit"] == CODE["commit"]


@pytest.mark.parametrize("holds", [True, False])
def test_the_table_and_the_result_follow_from_the_records(
    tmp_path: Path, stage_module: ModuleType, capsys: pytest.CaptureFixture[str], holds: bool
) -> None:
    goal = Goal("merged, batch 16 / bytes", 1.3 if holds else 1.5, 1.35, True)
    stage_module.run = lambda context: {"summary": "as fast as memory", "goals": [goal]}  # type: ignore[attr-defined]
    runner.run_stage(STAGES[0], "cpu", tmp_path, 60.0)
    said: list[str] = []
    checked = runner.check(tmp_path, "cpu", 0.001, chosen(["facts", "smoke"]), said.append)
    assert checked.succeeded is holds
    as_json = json.loads(json.dumps(checked.as_dict()))
    assert as_json["left"] == ["smoke"] and as_json["stages"]["facts"]["ok"] and as_json["stages"]["smoke"] is None
    runner.print_table(checked)
    table = capsys.readouterr().out
    assert "ok, earlier" in table and "as fast as memory" in table and "left" in table
    assert ("FALLS SHORT: merged, batch 16 / bytes" in table) is not holds
    assert said == ["left for the next call: smoke"]
    # Records that are copied to docs/results become part of its page.
    assert f"| merged, batch 16 / bytes | {'1.3' if holds else '**1.5**'} | <= 1.35 |" in page(tmp_path)


def test_unknown_stages_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no stage named 'warp'; choose among facts, smoke"):
        chosen(["facts", "warp"])
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match=r"cannot write the results in .*set another --out"):
        runner.check(tmp_path / "file", "cpu", 1.0, STAGES, lambda line: None)
