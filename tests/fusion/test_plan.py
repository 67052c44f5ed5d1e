"""Errors in a plan are reported with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusion
from fusion.plan.schema import read_plan_file
from vlora.errors import BadPlan

GOOD = """\
base: embedded
training:
  steps: 10
domains:
  - name: digits
    source: sklearn-digits
    question: what digit is shown ?
    threshold: 0.8
  - name: photos
    source: library-photos
    question: what does the photo show ?
    threshold: 0.7
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "plan.yaml"
    file.write_text(text)
    return file


def test_the_demo_has_real_pixels_heads_and_words() -> None:
    plans = Path(fusion.__file__).parent / "plans"
    own, full = (read_plan_file(plans / f"{name}.yaml").plan.domains for name in ("demo", "demo-full"))
    assert len(own) == 5 and len(full) == 8
    assert sum(str(domain.source).startswith("drawn-") for domain in own) <= 2
    assert {"digits", "readings"} <= {domain.name for domain in own}  # in words; the others have heads


DIGITS, PHOTOS, BASE = "threshold: 0.8", "source: library-photos", "base: embedded"
BY_SIMILARITY = "packing: first_fit\norder: [given, similarity]\nlora: {vision: true}"


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "text"),
    [
        (DIGITS, "threshold: 80", 8, "domains[0].threshold", "is 80; it must be at most 1"),
        (DIGITS, "threshold: {relative_to: luck}", 8, "domains[0].threshold.relative_to", "'luck'"),
        (DIGITS, "threshold: {relative_to: alone, minus: 1.5}", 8, "domains[0].threshold.minus", "1.5"),
        (DIGITS, "threshold: high", 8, "domains[0].threshold", "'high'"),
        (DIGITS, "threshold: true", 8, "domains[0].threshold", "is true; it must be a number"),
        ("    threshold: 0.7\n", "", 9, "domains[1].threshold", "is missing"),
        ("steps: 10", "steps: 10\nlora:\n  targets: []", 5, "lora.targets", "at least 1"),
        ("steps: 10", "stepps: 10", 3, "training.stepps", "spelling"),
        ("steps: 10", "steps: -3", 3, "training.steps", "-3"),
        ("steps: 10", "steps: yes", 3, "training.steps", "is true; it must be a number"),
        ("steps: 10", "learning_rate: 1.0e+300", 3, "training.learning_rate", "is 1e+300; it must be at most 1"),
        ("steps: 10", "learning_rate: .inf", 3, "training.learning_rate", "finite"),
        ("steps: 10", "batch_size: 8\n  rehearsal: 0.95", 2, "training", "leaves no sample for the new domain"),
        ("steps: 10", "batch_size: 1", 2, "training", "leaves no sample for the domains before it"),
        (BASE, "order: [given, backwards]", 1, "order[1]", "'backwards'"),
        (BASE, f"order: [{'random, ' * 64}given]", 1, "order", "has 65 items; at most 64 are allowed"),
        (BASE, "confidence: 1", 1, "confidence", "is 1; it must be below 1"),
        (BASE, "base: embedded\ncolour: red", 2, "colour", "spelling"),
        (BASE, "packing: jointly\norder: random", 2, "order", "without an order"),
        (BASE, BY_SIMILARITY, 2, "order", "`similarity` compares image features, which trainings change with `lora.v"),
        (BASE + "\ntraining:", "packing: jointly\ntraining:\n  rehearsal: 0.3", 2, "training", "without rehearsal"),
        (PHOTOS, f"{PHOTOS}\n    metric: luck", 11, "domains[1].metric", "'luck'"),
        (PHOTOS, "data: {format: tar, path: x}", 10, "domains[1].data", "has format 'tar'; choose"),
        (PHOTOS, "data: {path: x}", 10, "domains[1].data", "has no format"),
        (PHOTOS, "data: {format: coco}", 10, "domains[1].data.path", "is missing"),
        (PHOTOS, "data: {format: unlabelled, path: x}", 9, "domains[1]", "needs a `teacher`"),
        (PHOTOS, "task: vqa", 9, "domains[1]", "one of `source`"),
        (PHOTOS, f"{PHOTOS}\n    labels: [a, '']", 11, "domains[1].labels[1]", "at least 1"),
        (PHOTOS, f"{PHOTOS}\n    labels: [a, a]", 9, "domains[1]", "labels must be unique"),
        ("name: photos", "name: digits", 1, "plan", "two domains are named 'digits'"),
        ("name: photos", "name: my photos", 9, "domains[1].name", "pattern"),
        ("name: photos", f"name: {'p' * 120}", 9, "domains[1].name", "has 120 characters; at most 100"),
        ("what digit is shown ?", "' '", 7, "domains[0].question", "pattern"),
    ],
)
def test_errors_are_located(tmp_path: Path, old: str, new: str, line: int, field: str, text: str) -> None:
    file = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(BadPlan) as caught:
        read_plan_file(file)
    assert f"{file}, line {line}, field `{field}`" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("number", [2**63, "0x" + "f" * 20_000])
def test_integers_of_more_than_63_bits_are_refused(tmp_path: Path, number: object) -> None:
    with pytest.raises(BadPlan, match=r"plan.yaml, line 1: not YAML: .* cannot be read \(more than 63 bits\)"):
        read_plan_file(write(tmp_path, f"seed: {number}\n{GOOD}"))
    assert read_plan_file(write(tmp_path, f"seed: {2**63 - 1}\n{GOOD}")).plan.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("changes", "fields", "last"),
    [
        ({"steps: 10": "steps: 0", DIGITS: "threshold: 2", "0.7": "-1"}, 3, "`domains[1].threshold`"),
        ({BASE: "\n".join(f"field{number}: 1" for number in range(30))}, 21, "and 10 more"),
    ],
)
def test_all_errors_are_reported_together_up_to_twenty(
    tmp_path: Path, changes: dict[str, str], fields: int, last: str
) -> None:
    text = GOOD
    for old, new in changes.items():
        text = text.replace(old, new)
    with pytest.raises(BadPlan) as caught:
        read_plan_file(write(tmp_path, text))
    lines = str(caught.value).splitlines()
    assert len(lines) == fields and last in lines[-1]


def test_paths_are_relative_to_the_plan(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    text = GOOD.replace("source: sklearn-digits", "source: pictures")
    text = text.replace("source: library-photos", "data: {format: coco, path: there/boxes.json}")
    first, second = read_plan_file(write(tmp_path, text)).plan.domains
    assert first.source == str(tmp_path / "pictures")
    assert second.data is not None and second.data.path == tmp_path / "there" / "boxes.json"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("domains: [", "line 1: not YAML"),
        ("- 1\n- 2\n", "a plan is a mapping"),
        ("", "a plan is a mapping"),
        ("seed: 0\nbase: 2026-02-30\n", "line 2: not YAML: 2026-02-30 cannot be read .*quote the value if it is text"),
        (f"seed: {'9' * 5000}\n", "line 1: not YAML: 9{40}... cannot be read"),
        ("seed: 0b_\n", "line 1: not YAML: 0b_ cannot be read"),
        ("seed: 1\nbase: a\nseed: 2\n", "line 3: not YAML: duplicate field `seed`"),
        (f"seed: {'[' * 600}\n", "too deeply to be read"),
        ("domains: &all [*all]\n", r"field `domains\[0\]"),
        ("lora: &lora {rank: 4, targets: *lora}\n", "field `lora.targets`"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ndomains: [*c, *c]\n", r"field `domains\[0\]"),
        ("? [1, 2]\n: 3\n", "line 1: not YAML: a list or a mapping in place of a name"),
        ("seed: !!python/object/apply:os.getpid []\n", "line 1: not YAML: a tag"),
        ('base: "\\0"\ndomains: []\n', "`domains` is empty"),
    ],
)
def test_files_that_are_no_plan_are_refused(tmp_path: Path, text: str, want: str) -> None:
    with pytest.raises(BadPlan, match=want):
        read_plan_file(write(tmp_path, text))


def test_a_plan_may_merge_keys_and_a_missing_one_is_named(tmp_path: Path) -> None:
    text = GOOD.replace("  - name: digits\n", "  - &first\n    name: digits\n").replace(BASE, "packing: jointly")
    plan = read_plan_file(write(tmp_path, text + "  - {<<: *first, name: again, threshold: 0.6}\n")).plan
    assert [domain.threshold for domain in plan.domains] == [0.8, 0.7, 0.6] and plan.packing == "jointly"
    assert plan.training.steps == 10 and plan.lora.rank == 8
    with pytest.raises(BadPlan, match="cannot be read"):
        read_plan_file(tmp_path / "nothing.yaml")
