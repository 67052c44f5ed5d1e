"""`vlora fuse --check` describes a plan, or lists all its errors, without training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from fusion.data.load import DomainData
from fusion.data.samples import Splits
from fusion.plan.check import check_plan
from fusion.plan.estimate import Estimate, estimate, lora_size, shapes_of
from fusion.plan.schema import HEAD_SAMPLES, HEAD_STEPS, LoraPlan, Plan, read_plan_file
from fusion.plan.summary import summarize
from fusion.progress import Progress
from fusion.training.frozen_base import FrozenBase, load_frozen_base
from fusion.training.trainer import LoraTrainer, StepTime
from tests.fusion.made import picture, write_plan
from tests.fusion.mixed_plan import write_mixed_plan
from tests.fusion.small import boxes, color_splits, plan_of
from tools.embedded_model.model import build_model
from tools.embedded_model.processor import build_processor
from vlora.cli import cli, main
from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors, PlanText

pytestmark = pytest.mark.slow

DOMAIN = {"name": "a", "source": "drawn-signs", "question": "what ?", "threshold": 0.5}


PICTURES = "data: {format: image_folder, path: pictures}"


def animals(root: Path, count: int = 20) -> None:
    for place, label in enumerate(("cat", "dog")):
        for number in range(count):
            picture(root / "pictures" / label / f"{number}.png", 1000 * place + number)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output, with the error message that the command line's entry point prints."""
    result = CliRunner().invoke(cli, ["fuse", *arguments])
    message = str(result.exception) if isinstance(result.exception, BadPlan) else ""
    return result.exit_code, (result.output if result.exit_code else result.stdout) + message  # progress is on stderr


def test_a_plan_is_summarized_as_json(tmp_path: Path) -> None:
    animals(tmp_path)
    plan = write_plan(tmp_path, PICTURES, more="confidence: 0.95\ntraining: {seconds: 6}\n")
    code, output = run(str(plan), "--check", "--json")
    summary = json.loads(output)
    assert code == 0 and output.count("\n") == 1
    assert summary["lora"]["bytes"] == 4 * summary["lora"]["parameters"] and summary["training_s_at_most"] == 6
    found = summary["estimate"]
    assert found["step_s"] > 0 and found["measured_steps"] >= 1
    assert 1 <= found["measured_samples"] <= found["batch_size"]
    assert found["memory_bytes"] > 2**28 and found["features_bytes"] % 40 == 0 < found["features_bytes"]
    with Image.open(tmp_path / "plan-data.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 1000
    assert found["device"] == "cpu" and found["threads"] >= 1 and found["at_least_s"] == found["at_most_s"]
    # A single domain takes one training; its 6 s are processor time.
    assert found["at_least_s"] > min(6 / found["threads"], 100 * found["step_s"])
    (domain,) = summary["domains"]
    assert domain["counts"] == {"train": 28, "validation": 6, "test": 6}
    assert domain["classes"]["dog"] == {"train": 14, "validation": 3, "test": 3}
    assert (domain["task"], domain["head"], domain["metric"]) == ("classification", "classification", "accuracy")
    assert domain["threshold"] == 0.5 and domain["teacher"] is None
    assert summary["confidence"] == 0.95 and (domain["needs"], domain["better"]) == (620, 0.05)


AS_TEXT = """\
what is it ?
a classification head (and in words; the report gives both accuracies)
28 train, 6 validation, 6 test, one picture each
cat 14 / 3 / 3
share of samples answered correctly) of at least 0.500
needs 620 validation samples at a confidence of 0.95, so that an adapter 0.05 above the threshold passes in 80% of runs
there are 6 (warning: too few
 measured on this machine (cpu,
memory    about
 MB for image features (
note 1    validation (6) and test (6) split off from all 40 samples with seed 0"""


@pytest.mark.parametrize(
    ("more", "shown", "absent"),
    [
        ("confidence: 0.95\n", AS_TEXT.split("\n"), []),
        ("confidence: null\n", ["decided by the score itself"], ["power"]),
        (
            "packing: jointly\ntraining: {seconds: 60}\n",
            ["all domains of an adapter at once", "packing   jointly, seed 0"],
            ["rehears", "order"],
        ),
    ],
    ids=["text", "without a confidence", "joint training"],
)
def test_the_summary_names_what_the_plan_chooses(
    tmp_path: Path, more: str, shown: list[str], absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(0.1, 0.1))
    animals(tmp_path)
    code, output = run(str(write_plan(tmp_path, PICTURES, more=more)), "--check")
    assert code == 0 and all(text in output for text in shown) and not any(text in output for text in absent)


def test_the_summary_names_heads_that_train_by_themselves(tmp_path: Path) -> None:
    code, output = run(str(write_mixed_plan(tmp_path / "plan", "qwen2_5_vl")), "--check")
    assert code == 0 and "60 steps of 12 samples per domain; where" in output
    assert "rehearses those in it; 300 steps of 48 samples for each head that trains by itself (squares)" in output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("base: nowhere/at/all\n", "line 1, field `base`: 'nowhere/at/all' is neither"),
        ("lora:\n  targets: [q_proj, nose]\n", "line 2, field `lora.targets`"),
        ("", "cat/0.png is not a valid picture (JPEG"),
    ],
    ids=["base", "targets", "data"],
)
def test_invalid_plans_are_refused_before_training(tmp_path: Path, more: str, message: str) -> None:
    animals(tmp_path)
    if not more:
        (tmp_path / "pictures" / "cat" / "0.png").write_bytes(b"")
    plan = write_plan(tmp_path, PICTURES, more=more)
    for arguments in (("--check",), ("--out", str(tmp_path / "out"))):
        code, output = run(str(plan), *arguments)
        assert code == 1 and message in output
    assert not (tmp_path / "out").exists()
    code, output = run(str(plan))
    assert code == 2 and "--out is missing" in output


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "null",
        '{"model_type": "llava", "text_config": 5}',
        '{"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": -4}}',
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}',  # asks on a terminal whether to run it
    ],
)
def test_a_base_that_is_broken_or_code_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(config)
    (tmp_path / "base" / "own.py").write_text("raise SystemExit('code was run without permission')")
    with pytest.raises(BadPlan, match=r"line 1, field `base`: .* is neither"):
        check_plan(read_plan_file(write_plan(tmp_path, "source: lfw-faces", more="base: base\n")))


def test_a_threshold_relative_to_a_teacher_becomes_a_number(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "source: lfw-faces\nthreshold: {relative_to: teacher, minus: 0.1}")
    checked = check_plan(read_plan_file(plan))
    teacher_result = checked.data["domain0"].teacher_result
    assert teacher_result is not None and 0.9 < teacher_result.score <= 1
    assert checked.plan.domains[0].threshold_before_training(teacher_result.score) == teacher_result.score - 0.1
    (summary,) = summarize(checked)
    assert (
        summary.threshold == teacher_result.score - 0.1
        and f"its teacher's {teacher_result.score:.3f} minus 0.1" in summary.rule
    )
    # No person has 128 pixels, so about half of the answers are correct.
    unfit = "source: lfw-faces\nthreshold: {relative_to: teacher, minus: 0.9}\nteacher: {kind: hog, absent: no face}"
    with pytest.raises(BadPlan, match="which every adapter meets") as caught:
        check_plan(read_plan_file(write_plan(tmp_path, unfit)))
    assert "line 5, field `domains[0].threshold`: comes to -0." in str(caught.value)


def test_the_command_prints_one_error_per_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fields(*domains: str) -> list[str]:
        plan = write_plan(tmp_path, *domains, more="base: nowhere/at/all\n")
        monkeypatch.setattr("sys.argv", ["vlora", "fuse", str(plan), "--check"])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith(f"error: {plan}, line ") for line in lines)
        return [line.split("`")[1] for line in lines]

    assert fields("source: nowhere", "source: lfw-faces\nmetric: map") == ["domains[0].source", "domains[1].metric"]
    assert fields("source: lfw-faces") == ["base"]  # which takes seconds to open


def test_a_packaged_plan_is_found_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `vlora demo --out demo` makes this folder, and its repetition reads the plan `demo`.
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        (tmp_path / name).mkdir()
    for name, words in (("demo", "--out is missing"), ("other", "error: other: is a folder, and no plan of that name")):
        monkeypatch.setattr("sys.argv", ["vlora", "fuse", name])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert words in capsys.readouterr().err


# Name -> test samples, validation samples, frames of each domain.
SHIPPED = {
    "demo": ([397, 397, 400, 70, 500], [300, 300, 640, 30, 640], [1] * 5),
    "demo-full": ([397, 400, 400, 500, 500, 500, 500, 320], [300, 640, 400, 640, 640, 640, 640, 240], [1] * 7 + [2]),
}


@pytest.mark.parametrize(
    ("name", "shipped"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.exhaustive] * (row[0] != "demo")) for row in SHIPPED.items()],
)
def test_the_plans_that_ship_can_be_run(name: str, shipped: tuple[list[int], list[int], list[int]]) -> None:
    code, output = run(name, "--check", "--json")
    domains, (test, validation, frames) = json.loads(output)["domains"], shipped
    assert code == 0 and [domain["counts"]["test"] for domain in domains] == test
    assert [domain["counts"]["validation"] for domain in domains] == validation
    assert [domain["frames"] for domain in domains] == frames
    if name == "demo-full":  # scores around a half need most samples: photos, counts, boxes, references have enough
        assert [domain["needs"] for domain in domains] == [619] * 8


@pytest.mark.parametrize(
    "settings", [{}, {"rank": 3}, {"targets": ("q_proj", "down_proj")}, {"vision": True, "rank": 2}]
)
def test_an_adapter_is_as_large_as_peft_makes_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model
    from torch import nn

    model = build_model(seed=0)
    model.save_pretrained(str(tmp_path))
    build_processor().save_pretrained(str(tmp_path))
    lora = LoraPlan(**settings)
    plan, errors = Plan(base=str(tmp_path), lora=lora, domains=(DOMAIN,)), PlanErrors(PlanText())
    hf_model = shapes_of(plan, errors)
    assert hf_model is not None
    size = lora_size(plan, hf_model, errors)
    leaves = {name.rpartition(".")[2] for name, m in model.model.language_model.named_modules() if type(m) is nn.Linear}
    pattern = rf".*language_model\..*\.({'|'.join(lora.targets or leaves)})"
    if lora.vision:
        vision = [
            name
            for name, m in model.named_modules()
            if type(m) is nn.Linear and "language_model" not in name and m is not model.lm_head
        ]
        pattern = f"({pattern})|{'|'.join(vision)}"
    peft = get_peft_model(model, LoraConfig(r=lora.rank, target_modules=pattern))
    assert size is not None and size.parameters == sum(p.numel() for n, p in peft.named_parameters() if "lora_" in n)


# -- estimates from measured steps ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen(base: str) -> FrozenBase:
    return load_frozen_base(plan_of(base, ("a",)), "cpu", Progress())


SQUARES = Splits("detection", ("square",), boxes(30, 0), boxes(10, 1), boxes(10, 2), real=False)


def estimated(frozen: FrozenBase, *names: str, **training: Any) -> Estimate:
    """Of a plan of these domains, each with colours, or with boxes if it is named squares."""
    plan = plan_of("x", names, **training)
    data = {name: DomainData(SQUARES if name == "squares" else color_splits(), None) for name in names}
    return estimate(plan, data, frozen)


def test_an_estimate_is_near_what_steps_take(frozen: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        taken.append(len(rows))
        return StepTime(0.1 * len(rows), 0.1 * len(rows))

    monkeypatch.setattr(LoraTrainer, "time_step", time_step)
    found = estimated(frozen, "a", "b", steps=1000, batch_size=4)
    assert taken[:5] == [2, 2, 2, 2, 4] and set(taken[4:]) == {4}, "a few samples first, then whole batches"
    assert found.step_s == pytest.approx(0.4) and found.measured_samples == 4 and 1 <= found.measured_steps <= 8
    assert found.at_least_s > 2 * 1000 * 0.4 and found.at_most_s > 3 * 1000 * 0.4
    assert found.at_most_s < 3 * 1000 * 0.4 * 1.5, "scoring and encoding a hundred small pictures takes little time"
    # A step that takes long is measured on a few samples: the first one of a process, then later ones.
    seconds = itertools.chain([90.0, 3.0], itertools.repeat(2.0))
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(next(seconds), 1.0))
    found = estimated(frozen, "a", steps=10, batch_size=12)
    assert (found.measured_steps, found.measured_samples, found.step_s) == (1, 1, pytest.approx(24.0))
    # The time that a plan allows is processor time, of which a step on four cores takes four times its duration.
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(1.0, 4.0))
    found = estimated(frozen, "a", steps=10_000, batch_size=2, seconds=4000.0)
    assert 1000 < found.at_most_s < 1500, "all steps would take 10,000 s"


def test_heads_that_train_by_themselves_have_their_own_steps(
    frozen: FrozenBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no part in the batches of the LoRA. The second plan has real steps, and no others."""
    seen: set[str] = set()

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        seen.update(rows)
        return StepTime(0.1 * len(rows), 0.1)

    def time_head_step(self: LoraTrainer, domain: str, samples: int, steps: int) -> StepTime:
        assert domain == "squares" and samples == HEAD_SAMPLES * 4
        return StepTime(0.1, 0.1)

    with monkeypatch.context() as patched:
        patched.setattr(LoraTrainer, "time_step", time_step)
        patched.setattr(LoraTrainer, "time_head_step", time_head_step)
        found = estimated(frozen, "a", "squares", steps=1000, batch_size=4)
    assert seen == {"a"} and found.step_s == pytest.approx(0.4)
    assert found.at_least_s == pytest.approx(1000 * 0.4 + HEAD_STEPS * 1000 * 0.1, rel=0.1)
    found = estimated(frozen, "squares", steps=1000, batch_size=4)
    assert found.batch_size == found.measured_samples == HEAD_SAMPLES * 4
    assert found.at_least_s > HEAD_STEPS * 1000 * found.step_s > 0
    found = estimated(frozen, "a", steps=3, batch_size=4)
    assert 0 < found.step_s < 60 and found.threads is not None
