"""`vlora bench paper`: the list of figures is complete, measurements are stored and read again, pages and pictures are
written.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure as Canvas
from PIL import Image

from atmm.layers import Factors, Site
from atmm.segments import Lane, SegmentPlan
from atmm.tuning.search import Shape
from benchmarks import paper, plots
from benchmarks.paper import BENCH, ELSEWHERE, FIGURES, benches, chosen, find, operators
from benchmarks.paper import figure as figure_module
from benchmarks.paper.benches import ranks
from benchmarks.paper.figure import PAPERS, Comparison, Fact, Figure, Found, Measuring, Setting
from benchmarks.paper.operators import EINSUM, OURS, operator_seconds, segments_of
from benchmarks.paper.rival_engine import SYSTEMS, LaneOperator, MergeAdapter
from benchmarks.paper.simulations import machine_costs, systems
from vlora.bench import harness
from vlora.bench.dummy import BenchModel, small_config
from vlora.bench.harness import Store, measured
from vlora.bench.report import Report, environment
from vlora.bench.timing import threads
from vlora.errors import BadConfig
from vlora.orchestrator.cost_model import Costs
from vlora.simulator.machine import read_costs

# The figures that the benchmark is for; those of V-LoRA also have 22 and 23.
WANTED = {
    "v-lora": [*(f"fig{n}" for n in (3, 4, 5, 6, 7, 12, *range(14, 24))), "table1", "table2", "table3"],
    "s-lora": [*(f"fig{n}" for n in (5, 6, 8, 9, 10, 11, 12)), "table3"],
    "punica": [f"fig{n}" for n in (1, 7, 8, 9, 10, 11)],
    "bd-lora": [f"fig{n}" for n in (1, 10, 11, 12, 16, 19, 23, 24)],
    "symbiosis": [*(f"fig{n}" for n in (9, 10, 11, 13, 19, 21, 22, 23)), "table2", "table4", "table5"],
}
TINY = BenchModel("tiny", small_config, 2**26)


@pytest.fixture
def measuring(tmp_path: Path) -> Measuring:
    return Measuring(Setting(True, torch.device("cpu"), TINY), Store(tmp_path / "stored", {}))


def test_each_figure_is_drawn_or_listed_with_what_it_needs() -> None:
    drawn, listed = {figure.key for figure in FIGURES}, {each.key: each.needs for each in ELSEWHERE}
    wanted = {f"{paper}:{number}" for paper, numbers in WANTED.items() for number in numbers}
    assert wanted <= drawn | listed.keys()
    assert not drawn & listed.keys()
    assert len(drawn) == len(FIGURES)
    assert all(len(needs) > 20 for needs in listed.values())


def test_a_paper_s_numbers_have_a_source_and_a_unit() -> None:
    facts = [(figure, fact) for figure in FIGURES for fact in figure.facts]
    assert facts
    for figure, fact in facts:
        assert figure.paper in PAPERS
        assert re.search(r"\d", fact.source), figure.key
        assert fact.unit in ("%", "x", "ms", "req/s"), figure.key
        assert fact.value > 0
        assert [other.quantity for other in figure.facts].count(fact.quantity) == 1, figure.key


@pytest.mark.parametrize("own", FIGURES, ids=lambda each: each.key)
def test_a_measurement_and_its_quick_run_have_the_arguments_of_their_function(own: Figure) -> None:
    for panel in own.panels:
        assert plots.Panel(**panel).kind
    stated: Any = own.measure
    while stated is not None:
        arguments = {name: value for name, value in stated.items() if name not in ("call", "share", "of", "quick")}
        if "of" in stated:
            arguments["rows"] = []
        function = pkgutil.resolve_name(f"benchmarks.paper.{stated['call']}")
        inspect.signature(function).bind(None, **arguments)
        inspect.signature(function).bind(None, **{**arguments, **stated.get("quick", {})})
        stated = stated.get("of")


def figure(number: str = "fig1", **settings: Any) -> Figure:
    """A figure whose measurement is `counted`."""
    return Figure(
        paper="v-lora",
        number=number,
        title="a <title>",
        states="Something is faster.",
        caption="A test.",
        measure={"call": "counted"},
        panels=[{"kind": "lines", "x": "x", "y": "ms", "settings": {"xlabel": "x", "ylabel": "ms"}}],
        facts=FACTS,
        beside="x",
        **settings,
    )


FACTS = (
    Fact("speed-up", 3.0, "x", "section 1", Comparison("ms", {"x": 2}, {"x": 1})),
    Fact("of other hardware", 2.0, "x", "section 2", Comparison("ms", {"x": 3}, {"x": 1})),
)


def store_costs(measuring: Measuring) -> None:
    """Measurements from which simulations are derived."""
    costs = Costs(base_s=0.02, token_s=4e-4, lane_s=2e-4, adapter_s=1e-3, merge_s=0.05)
    measuring.once("costs", lambda: {"costs": {**costs._asdict(), "load_s": 0.005}})
    measuring.once("einsum-ratios", lambda: {"short": 3.0, "long": 2.0})
    measuring.once("switching", lambda: {"merge": 50.0, "back": 0.1, "PEFT merge": 200.0, "PEFT unmerge": 200.0})


def few(key: str, requests: int) -> dict[str, Any]:
    """The measurement of a simulated figure's quick run, with few requests."""
    (found,) = chosen([key])
    return {**found.measure, "quick": {**found.measure["quick"], "requests": requests}}


def test_a_figure_of_costs_and_the_simulator_end_to_end(measuring: Measuring, tmp_path: Path) -> None:
    store_costs(measuring)
    (switch,) = chosen(["v-lora:fig21"])
    found = find(measuring, **few(switch.key, 8))
    assert {row["system"] for row in found["rows"]} <= set(systems(measuring))
    ratios = switch.here(found)
    assert set(ratios) == {fact.quantity for fact in switch.facts}
    ms = {row["system"]: row["ms"] for row in found["rows"]}
    assert ms["dLoRA (its operator and switch)"] > ms["cost_based (default here)"]
    switch.picture(found, measuring.setting).save(tmp_path / "switch.png")
    assert (tmp_path / "switch.png").stat().st_size > 10_000


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The only figure counts its measurements."""
    made: list[str] = []

    def counted(_: Measuring) -> list[dict[str, float]]:
        made.append("measured")
        return [{"x": 1, "ms": 1.0}, {"x": 2, "ms": 4.0}]

    monkeypatch.setattr(paper, "counted", counted, raising=False)
    monkeypatch.setattr(paper, "FIGURES", [figure(runs_on="processes")])
    yield made


def test_the_page_has_the_picture_both_numbers_and_the_rest(calls: list[str], tmp_path: Path) -> None:
    report = measured(BENCH, True, tmp_path)
    assert [(row["paper"], row["here"]) for row in report.rows] == [(3.0, 4.0), (2.0, None)]
    page = (tmp_path / "paper" / "index.html").read_text()
    assert 'src="v-lora-fig1.png"' in page
    assert "a &lt;title&gt;" in page
    assert "n/a" in page
    assert all(each.title in page for each in ELSEWHERE if "'" not in each.title)
    with Image.open(tmp_path / "paper" / "v-lora-fig1.png") as picture:
        assert picture.width == 1000
        assert len(picture.convert("RGB").getcolors(2**24) or []) > 20
    assert measured(BENCH, True, tmp_path).rows == report.rows
    assert calls == ["measured"]


def test_measurements_of_this_machine_at_another_commit_are_used_and_marked(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = environment()
    for number, (key, value) in enumerate({"commit": "0123456789abcdef", "machine": "another"}.items(), start=1):
        monkeypatch.setattr(harness, "environment", lambda key=key, value=value: env | {key: value})
        measured(BENCH, True, tmp_path)
        monkeypatch.undo() if number == 2 else None
        page = (tmp_path / "paper" / "index.html").read_text()
        assert bool(re.search(r"At other commits:\s+v-lora:fig1-2 at 0123456789ab\.", page)) == (key == "commit")
        assert len(calls) == number


def test_the_simulator_reads_the_measured_costs(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "paper" / "work"
    store = Store(folder, environment())
    store_costs(Measuring(Setting.here(False), store))
    measured(BENCH, False, tmp_path)
    (trace,) = (each for each in ELSEWHERE if each.key == "s-lora:fig7")
    path = Path(str(trace.command).rpartition(" --costs ")[2])
    assert tmp_path / path.relative_to("DIR") == folder / path.name
    assert read_costs(folder / path.name) == machine_costs(Measuring(Setting.here(False), store))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_figures_of_one_thread_are_measured_in_processes(tmp_path: Path) -> None:
    store_costs(Measuring(Setting.here(True), Store(tmp_path / "paper" / "quick", environment())))
    report = measured(BENCH, True, tmp_path, figures=("v-lora:table3", "v-lora:fig21"))
    assert list(report.found["measured"]) == ["v-lora:fig21", "v-lora:table3"]
    assert {file.name for file in (tmp_path / "paper").glob("*.png")} == {"v-lora-fig21.png", "v-lora-table3.png"}


def test_the_longest_figures_begin_first() -> None:
    minutes = [chosen([key])[0].minutes for key, quick in BENCH.cases(False).values()]
    assert minutes == sorted(minutes, reverse=True) and len(minutes) == len(FIGURES)


@pytest.mark.parametrize(
    ("runs_on", "alone"), [("setting", False), ("cpu", False), ("cores", False), ("processes", True), ("ranks", True)]
)
def test_figures_run_alone_if_they_are_in_wall_time_or_beside_a_gpu(runs_on: str, alone: bool, gpu: Setting) -> None:
    own = figure(runs_on=runs_on)
    assert own.runs_alone(gpu)
    on_cpu = dataclasses.replace(gpu, device=torch.device("cpu"))
    assert own.runs_alone(on_cpu) == alone
    assert own.num_threads(on_cpu, 2) == 1
    assert own.device_words(on_cpu).endswith(", one thread")


def test_dlora_s_lanes_and_switches_cost_as_much_more_as_measured(measuring: Measuring) -> None:
    costs = Costs(base_s=0.02, lane_s=1.0, long_lane_s=1.0, adapter_s=1.0, long_adapter_s=1.0, merge_s=2.0)
    measuring.once("costs", lambda: {"costs": {**costs._asdict(), "load_s": 0.0}})
    measuring.once("einsum-ratios", lambda: {"short": 3.0, "long": 2.0})
    measuring.once("switching", lambda: {"merge": 10.0, "back": 0.1, "PEFT merge": 40.0, "PEFT unmerge": 30.0})
    slower = systems(measuring)["dLoRA (its operator and switch)"].costs
    assert (slower.lane_s, slower.adapter_s, slower.long_lane_s, slower.long_adapter_s) == (3.0, 3.0, 2.0, 2.0)
    assert (slower.merge_s, slower.back_s, slower.base_s) == (8.0, 6.0, 0.02)


@pytest.mark.parametrize(("slow", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_other_operators_have_the_type_that_is_faster_here(
    slow: bool, dtype: torch.dtype, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure_module, "prefers_float32", lambda *_: slow)
    inputs: dict[str, torch.dtype] = {}

    def noted(site: Site, plan: object, rank: int, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        assert {factor.dtype for pair in site.factors.values() for factor in pair} == {x.dtype} == {y.dtype}
        inputs["x"] = x.dtype
        return {}, []

    monkeypatch.setattr(operators, "baselines", noted)
    operator_seconds(measuring.setting, Shape(48, (40,)), 8, [3, 2], rounds=1)
    assert inputs["x"] is dtype


def test_every_operator_is_timed_in_every_round(measuring: Measuring) -> None:
    seconds = operator_seconds(measuring.setting, Shape(48, (40,)), 8, [3, 2, 1], rounds=2)
    assert len(seconds) == 5
    assert {len(taken) for taken in seconds.values()} == {2}
    assert set(operator_seconds(measuring.setting, Shape(48, (40,)), 8, [3, 2], 1, ["PEFT"])) == {OURS, "PEFT"}


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_segments_follow_punica_s_popularity(batch: int) -> None:
    assert segments_of("distinct", batch) == [1] * batch
    assert segments_of("identical", batch) == [batch]
    assert sum(segments_of("uniform", batch)) == sum(segments_of("skewed", batch)) == batch
    assert max(segments_of("uniform", batch)) - min(segments_of("uniform", batch)) <= 1


def test_an_unknown_figure_and_one_of_another_machine_are_refused() -> None:
    with pytest.raises(BadConfig, match=r"no figure 'v-lora:fig99'; choose among v-lora:fig4"):
        chosen(["v-lora:fig99"])
    with pytest.raises(BadConfig, match=r"punica:fig13 .* is not drawn by this command; it needs 16 GPUs"):
        chosen(["punica:fig13"])


def test_pictures_need_a_folder() -> None:
    with pytest.raises(BadConfig, match="give --out DIR"):
        measured(BENCH, True)


def mixture(*decode: tuple[float, float, float]) -> Found:
    """Measurements of figure 20 in which decode steps take these milliseconds: merged, mixed, unmerged."""
    phases = {"prefill": [(10.0, 11.0, 12.0)] * len(decode), "decode": decode}
    return {
        "rows": [
            {"starving": starving, "phase": phase, "mode": mode, "ms": ms, "more": ms - row[0]}
            for phase, rows in phases.items()
            for starving, row in zip([1, 4, 7, 10], rows, strict=False)
            for mode, ms in zip(("merged", "mixed", "unmerged"), row, strict=True)
        ]
    }


def test_the_share_that_the_mixed_mode_saves_counts_all_cells() -> None:
    (saving,) = chosen(["v-lora:fig20"])
    # The first cell is noise: unmerged steps are faster. The last one is beyond half of the batch.
    found = mixture((10.0, 11.0, 9.0), (10.0, 11.0, 14.0), (10.0, 12.0, 15.0), (10.0, 99.0, 11.0))
    here = {name.rpartition(", ")[2]: value for name, value in saving.here(found).items()}
    assert here == {"prefill": pytest.approx(50.0), "decode": pytest.approx(50.0)}
    assert all(goal.holds for goal in saving.goals_of(found))


@pytest.mark.parametrize("unmerged", [9.0, 10.0])
def test_unmerged_steps_without_extra_time_are_reported(unmerged: float) -> None:
    (saving,) = chosen(["v-lora:fig20"])
    found = mixture(*[(10.0, 10.0, unmerged)] * 3)
    assert saving.here(found)["saved below half of the batch, decode"] is None
    prefill, decode, *_ = saving.goals_of(found)
    assert prefill.holds
    assert not decode.holds
    assert decode.value == pytest.approx(3 * (unmerged - 10.0))
    saving.picture(found, Setting.here(True)).draw(Canvas())


def test_this_project_s_operator_is_not_compared_with_the_papers_systems() -> None:
    (extra,) = chosen(["v-lora:fig6"])
    rows = [
        {"mode": "merged", "operator": OURS, "ms": 100.0, "more": 0.0},
        {"mode": "unmerged", "operator": OURS, "ms": 110.0, "more": 10.0},
        {"mode": "alone", "operator": EINSUM, "more": 40.0},
        {"mode": "alone", "operator": "PEFT", "more": 60.0},
    ]
    here = extra.here({"rows": rows})
    assert list(here.values()) == [pytest.approx(40.0), pytest.approx(60.0)]
    assert set(here) == {fact.quantity for fact in extra.facts}


def test_s_lora_s_throughput_is_of_unmerged_only_with_5_and_2000_adapters(measuring: Measuring) -> None:
    store_costs(measuring)
    (numbers,) = chosen(["s-lora:fig5"])
    found = find(measuring, **few(numbers.key, 4))
    rows = [row for row in found["rows"] if row["system"] == "unmerged only (S-LoRA, Punica)"]
    assert [row["adapters"] for row in rows] == [1, 5, 20, 200, 2000]
    for place, row in enumerate(rows):
        row["requests/s"] = 10.0 - place
    assert numbers.here(found) == {numbers.facts[0].quantity: pytest.approx(100 * 6 / 9)}


def test_an_operator_that_was_not_timed_has_no_number_and_no_goal() -> None:
    (times,) = chosen(["v-lora:fig17"])
    rows = [{"operator": EINSUM, "x this project": ratio} for ratio in (2.0, 8.0)]
    assert times.here({"rows": rows}) == {
        "S-LoRA's operator": None,
        "Punica's operator": None,
        "dLoRA's operator": pytest.approx(4.0),
    }
    (goal,) = times.goals_of({"rows": rows})
    assert EINSUM in goal.name and goal.holds


@pytest.fixture
def on_ranks(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Steps of two ranks: block-diagonal adapters are as fast as split ones, with a delay twice as fast."""
    steps = [
        {
            "phase": phase,
            "batch": batch,
            "latency us": delay,
            "rank": rank,
            "base ms": 10.0,
            "replicated / base": 1.0,
            "slora / base": 2.0 if delay else 1.0,
            "bd / base": 1.0,
        }
        for phase, batch in (("decode", 1), ("decode", 64), ("prefill", 1))
        for delay in (0, 200)
        for rank in (16, 64, 256)
    ]
    monkeypatch.setattr(benches, "measured", lambda *_, **__: Report("tp", steps, []))
    return {"rows": [{**row, "accuracy": 80.0} for row in ranks(measuring, 128)]}


@pytest.mark.parametrize("number", ["fig1", "fig10"])
def test_numbers_beside_bd_lora_s_are_without_an_added_delay(number: str, on_ranks: Found) -> None:
    (own,) = chosen([f"bd-lora:{number}"])
    found = on_ranks
    if number == "fig1":
        alone = [row for row in found["rows"] if row["batch"] == 1 and not row["delay us"]]
        found = {"rows": [row for row in alone if row["adapter"] in (SPLIT, BLOCKS)]}
    assert own.here(found) == {fact.quantity: pytest.approx(1.0) for fact in own.facts}
    canvas = Canvas()
    own.picture(found, Setting.here(True)).draw(canvas)
    delayed = [axis.get_title() for axis in canvas.axes if "+200 µs" in axis.get_title()]
    assert len(delayed) == (2 if number == "fig10" else 0)


SPLIT, BLOCKS = "split (S-LoRA)", "block-diagonal (BD-LoRA)"


ON_CPU = {
    *(f"v-lora:{number}" for number in ("fig4", "fig5", "fig15", "fig16", "table2")),
    *(f"symbiosis:{number}" for number in ("fig9", "fig10", "fig22", "fig23", "table5")),
}
ON_RANKS = {"s-lora:fig8", "bd-lora:fig1", "bd-lora:fig10"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The setting of a machine with a GPU, where `vlora bench paper` can run as far as measurements are replaced."""
    setting = Setting(True, torch.device("cuda"), TINY)
    monkeypatch.setattr(Setting, "here", lambda quick: setting)
    monkeypatch.setattr(figure_module, "environment", lambda: environment() | {"gpu": "a GPU"})
    return setting


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_caption_names_the_device_that_its_figure_uses(
    gpu: Setting, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    on_cpu = {figure.key for figure in FIGURES if "a GPU;" not in figure.words(gpu)}
    assert on_cpu == (ON_CPU | ON_RANKS if num_gpus == 1 else ON_CPU)
    assert "one thread" not in chosen(["v-lora:fig4"])[0].words(gpu)
    (heads,) = chosen(["v-lora:fig16"])
    assert "one thread; the 0.5 B model" in heads.words(gpu)


@pytest.mark.parametrize(("runs_on", "num_threads"), [("cpu", 1), ("cores", 2), ("setting", 2)])
def test_measurements_on_a_cpu_have_one_thread_beside_a_gpu(
    gpu: Setting, runs_on: str, num_threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = []

    def counted(_: Measuring) -> list[dict[str, float]]:
        counts.append(torch.get_num_threads())
        return [{"x": 1, "ms": 1.0}]

    monkeypatch.setattr(paper, "counted", counted, raising=False)
    monkeypatch.setattr(paper, "FIGURES", [figure(runs_on=runs_on)])
    monkeypatch.setattr(plots.Picture, "save", lambda *_: None)
    with threads(2):
        measured(BENCH, True, tmp_path)
        assert torch.get_num_threads() == 2
    assert counts == [num_threads]


@pytest.mark.parametrize("add", [system.add for system in SYSTEMS.values() if system.add is not None])
def test_another_systems_operator_adds_the_deltas_of_the_reference(add: Any) -> None:
    torch.manual_seed(0)
    factors = {key: Factors(torch.randn(rank, 6), torch.randn(rank, 5)) for key, rank in (("a", 2), ("b", 4))}
    site = Site("layer", 6, 5)
    site.factors.update(factors)
    lanes = [Lane("a", 0, 3), Lane("elsewhere", 3, 4), Lane("b", 4, 9), Lane("b", 9, 10, -1.0)]
    x, y = torch.randn(11, 6), torch.randn(11, 5)
    wanted = y.clone()
    for key, start, stop, sign in (lane for lane in lanes if lane.key in factors):
        wanted[start:stop] += sign * x[start:stop] @ factors[key].a.T @ factors[key].bt
    LaneOperator(add, SegmentPlan(11, lanes))(y, x, site, None)
    assert torch.allclose(y, wanted, atol=1e-5)


def test_dloras_switch_adds_and_subtracts_each_layers_delta() -> None:
    weights = {"q": torch.randn(5, 6), "v": torch.randn(5, 6)}
    before = {name: weight.clone() for name, weight in weights.items()}
    a, bt = {"one": torch.randn(1, 2, 6), "two": torch.randn(1, 2, 6)}, torch.randn(1, 2, 5)
    slabs = SimpleNamespace(slots=weights, entry=weights.__getitem__)
    switcher = MergeAdapter(slabs, SimpleNamespace(shapes=lambda key: ["q"], stacked=lambda key, names: (a[key], bt)))
    assert switcher.switch("one") and not switcher.switch("one")
    assert torch.allclose(weights["q"], before["q"] + bt[0].T @ a["one"][0], atol=1e-5)
    assert switcher.switch("two") and torch.equal(weights["v"], before["v"])
    assert torch.allclose(weights["q"], before["q"] + bt[0].T @ a["two"][0], atol=1e-5)
    switcher.forget("two")
    assert switcher.merged_key is None and torch.allclose(weights["q"], before["q"], atol=1e-5)


def test_a_figure_of_systems_misses_its_goal_with_a_wrong_answer() -> None:
    (own,) = chosen(["v-lora:fig22"])
    point = {"traffic": "retrieval", "skew": 0.3, "p99 s": 1.0, "attainment": 90.0}
    rows = [{**point, "system": name, "ms": 2.0 if place else 1.0} for place, name in enumerate(SYSTEMS)]
    assert list(own.here({"rows": rows}).values()) == [50.0] * 6
    for wrong in (0, 1):
        (goal,) = own.goals_of({"rows": [], "goals": [["answers of dLoRA", wrong, 0, True]]})
        assert goal.holds is not bool(wrong)
