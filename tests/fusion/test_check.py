"""`vlora fuse --check` describes a plan, or lists all its mistakes, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fusion.embedded.model import build_model
from fusion.embedded.processor import build_processor
from fusion.plan.check import check, explain
from fusion.plan.lora_size import lora_size, shapes_of
from fusion.plan.mistakes import Mistakes, PlanText
from fusion.plan.schema import LoraPlan, Plan, read_plan_file
from fusion.teachers.labelling import threshold_before_training
from tests.fusion.made import picture, write_plan
from vlora.cli import cli, main
from vlora.errors import BadPlan

pytestmark = pytest.mark.slow

DOMAIN = {"name": "a", "source": "drawn-signs", "question": "what ?", "threshold": 0.5}


def animals(root: Path, count: int = 20) -> None:
    for place, label in enumerate(("cat", "dog")):
        for number in range(count):
            picture(root / "pictures" / label / f"{number}.png", 1000 * place + number)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output, with the error message that the command line's entry point prints."""
    result = CliRunner().invoke(cli, ["fuse", *arguments])
    told = str(result.exception) if isinstance(result.exception, BadPlan) else ""
    return result.exit_code, (result.output if result.exit_code else result.stdout) + told  # progress is on stderr


def test_a_plan_is_told_as_json(tmp_path: Path) -> None:
    animals(tmp_path)
    plan = write_plan(tmp_path, "data: {format: image_folder, path: pictures}", more="training: {seconds: 6}\n")
    code, output = run(str(plan), "--check", "--json")
    told = json.loads(output)
    assert code == 0 and output.count("\n") == 1
    assert told["lora"]["bytes"] == 4 * told["lora"]["parameters"] and told["training_s_at_most"] == 6
    found = told["estimate"]
    assert found["step_s"] > 0 and found["measured_steps"] >= 1
    assert 1 <= found["measured_samples"] <= found["batch_size"]
    assert found["device"] == "cpu" and found["threads"] >= 1 and found["at_least_s"] == found["at_most_s"]
    assert found["at_least_s"] > min(6, 100 * found["step_s"]), "a single domain takes one training"
    (domain,) = told["domains"]
    assert domain["counts"] == {"train": 28, "validation": 6, "test": 6}
    assert domain["classes"]["dog"] == {"train": 14, "validation": 3, "test": 3}
    assert (domain["task"], domain["head"], domain["metric"]) == ("classification", "classification", "accuracy")
    assert domain["threshold"] == 0.5 and domain["teacher"] is None


def test_a_plan_is_told_in_words(tmp_path: Path) -> None:
    animals(tmp_path)
    code, output = run(str(write_plan(tmp_path, "data: {format: image_folder, path: pictures}")), "--check")
    assert code == 0
    for said in (
        "what is it ?",
        "a classification head (and in words; the report gives both accuracies)",
        "28 train, 6 validation, 6 test, one picture each",
        "cat 14 / 3 / 3",
        "share of samples answered correctly) of at least 0.500",
        "time      about ",
        " measured on this machine (cpu, ",
    ):
        assert said in output


def test_domains_trained_at_once_are_told_so(tmp_path: Path) -> None:
    animals(tmp_path)
    lines = "data: {format: image_folder, path: pictures}"
    code, output = run(str(write_plan(tmp_path, lines, more="packing: jointly\ntraining: {seconds: 60}\n")), "--check")
    assert code == 0 and "all domains of an adapter at once" in output and "packing   jointly, seed 0" in output
    assert "rehears" not in output and "order" not in output


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("base: nowhere/at/all\n", "line 1, field `base`: 'nowhere/at/all' is neither"),
        ("lora:\n  targets: [q_proj, nose]\n", "line 2, field `lora.targets`"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(tmp_path: Path, more: str, says: str) -> None:
    animals(tmp_path)
    plan = write_plan(tmp_path, "data: {format: image_folder, path: pictures}", more=more)
    for arguments in (("--check",), ("--out", str(tmp_path / "out"))):
        code, output = run(str(plan), *arguments)
        assert code != 0 and says in output
    assert not (tmp_path / "out").exists()


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
        check(read_plan_file(write_plan(tmp_path, "source: lfw-faces", more="base: base\n")))


def test_all_that_is_wrong_is_told_together(tmp_path: Path) -> None:
    more = "base: nowhere/at/all\n"
    plan = write_plan(tmp_path, "source: nowhere", "source: lfw-faces\nmetric: map", more=more)
    with pytest.raises(BadPlan) as caught:
        check(read_plan_file(plan))
    fields = [line.split("`")[1] for line in str(caught.value).splitlines()]
    assert fields == ["base", "domains[0].source", "domains[1].metric"]


def test_a_threshold_relative_to_a_teacher_becomes_a_number(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "source: lfw-faces\nthreshold: {relative_to: teacher, minus: 0.1}")
    checked = check(read_plan_file(plan))
    teaching = checked.data["domain0"].teaching
    assert teaching is not None and 0.9 < teaching.score <= 1
    assert threshold_before_training(checked.plan.domains[0], teaching.score) == teaching.score - 0.1
    (told,) = explain(checked)
    assert told.threshold == teaching.score - 0.1 and f"its teacher's {teaching.score:.3f} minus 0.1" in told.promise
    # No person has 128 pixels, so about half of the answers are correct.
    unfit = "source: lfw-faces\nthreshold: {relative_to: teacher, minus: 0.9}\nteacher: {kind: hog, absent: no face}"
    with pytest.raises(BadPlan, match="which every adapter meets") as caught:
        check(read_plan_file(write_plan(tmp_path, unfit)))
    assert "line 5, field `domains[0].threshold`: comes to -0." in str(caught.value)


def test_data_is_told_as_wrong_with_a_non_zero_exit(tmp_path: Path) -> None:
    animals(tmp_path)
    (tmp_path / "pictures" / "cat" / "0.png").write_bytes(b"")
    code, output = run(str(write_plan(tmp_path, "data: {format: image_folder, path: pictures}")), "--check")
    assert code == 1 and "cat/0.png is not a valid picture (JPEG" in output


def test_the_command_tells_each_mistake_on_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path, "source: nowhere", "source: here")
    monkeypatch.setattr("sys.argv", ["vlora", "fuse", str(plan), "--check"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(",")[1] for line in told] == [" line 5", " line 9"]
    assert all(line.startswith(f"error: {plan}") for line in told)


def test_without_check_a_folder_for_the_result_is_needed(tmp_path: Path) -> None:
    code, output = run(str(write_plan(tmp_path, "source: lfw-faces")))
    assert code == 2 and "--out is missing" in output


def test_the_plan_that_ships_can_be_run() -> None:
    import fusion

    file = Path(fusion.__file__).parent / "plans" / "demo.yaml"
    domains = explain(check(read_plan_file(file)))
    assert [domain.counts["test"] for domain in domains] == [397, 400, 400, 500, 500, 500, 500, 320]
    assert [domain.frames for domain in domains] == [1, 1, 1, 1, 1, 1, 1, 2]


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
    plan, mistakes = Plan(base=str(tmp_path), lora=lora, domains=(DOMAIN,)), Mistakes(PlanText())
    seam = shapes_of(plan, mistakes)
    assert seam is not None
    size = lora_size(plan, seam, mistakes)
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
