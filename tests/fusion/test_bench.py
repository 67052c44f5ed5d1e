"""`vlora bench fusion` and `retrieve`, and block-diagonal adapters, without training: domains, counts and goals."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import tarfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from benchmarks import adapters
from benchmarks.fusion import domains
from benchmarks.fusion import packing as packing_bench
from benchmarks.fusion.domains import Pictures
from fusion.data.load import load_domains
from fusion.packing.algorithm import History, Score, TrainingResult
from fusion.plan.schema import LoraPlan, read_plan_file
from tests.fusion import small
from vlora.bench.harness import Measured
from vlora.errors import BadConfig
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import Part

SIZES: dict[Part, int] = {"train": 40, "validation": 10, "test": 15}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    """Photographs, stamps, fonts and emoji as the packages have them, of plain colours."""
    folder, rng = tmp_path_factory.mktemp("packages"), np.random.default_rng(0)

    def drawn(name: str) -> Path:
        shape = Image.new("RGBA", (60, 40))
        shape.paste((*rng.integers(0, 255, 3).tolist(), 255), (8, 4, 50, 36))
        shape.save(folder / f"{name}.png")
        return folder / f"{name}.png"

    photos = [Image.fromarray(rng.integers(0, 255, (800, 1280, 3), dtype=np.uint8)) for _ in range(2)]
    stamps = {kind: [[drawn(f"{kind}{n}"), drawn(f"{kind}{n}_mirror")] for n in range(6)] for kind in domains.KINDS}
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    emoji = {
        category: {
            f"{n}": [functools.partial(Image.open, drawn(f"{category} {n} {vendor}")) for vendor in range(4)]
            for n in range(3)
        }
        for category, _ in domains.EMOJI.values()
    }
    return Pictures(photos, stamps, {f"family {n}": [font] for n in range(4)}, emoji)


def test_real_domains_are_plans_whose_parts_share_no_drawing(pictures: Pictures, tmp_path: Path) -> None:
    file = read_plan_file(domains.write(pictures, tmp_path, SIZES))
    errors = PlanErrors(file.text)
    data = load_domains(file.plan, errors)
    errors.raise_if_any()
    assert [own.name for own in domains.SUITE] == list(data) and len(data) >= 8
    assert {own.splits.task for own in data.values()} >= {
        "classification",
        "vqa",
        "captioning",
        "counting",
        "detection",
    }
    for name, own in data.items():
        parts = own.splits.parts
        assert {part: len(samples) for part, samples in parts.items()} == SIZES and own.splits.real, name
        shown = {part: {sample.group for sample in samples if sample.group} for part, samples in parts.items()}
        assert not shown["train"] & (shown["validation"] | shown["test"]) and not shown["validation"] & shown["test"]
        assert not [note for note in own.notes if "training pictures" in note]
    assert {sample.target for sample in data["counts"].splits.test} == set(range(5))
    shown_boxes: Any = [sample.target for sample in data["boxes"].splits.test]
    boxes = list(itertools.chain(*shown_boxes))
    assert boxes and all(0 <= box.left < box.right <= 1 and 0 <= box.top < box.bottom <= 1 for box in boxes)


def test_variants_of_a_stamp_and_regions_of_a_photograph_are_in_one_part(pictures: Pictures) -> None:
    for items in (pictures.stamps["animal"], list(range(2, 40)), list(range(25))):
        parts = [domains.divided(items, part) for part in SIZES]
        assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, items)) and all(parts)
    names = ["cow", "cow_white", "pig_golden", "pig_golden2", "tiger"]
    assert [len(files) for files in domains.variants(Path(f"{name}.png") for name in names)] == [2, 2, 1]
    columns = np.tile(np.arange(1280, dtype=np.uint16)[None, :, None] // 5, (800, 1, 3)).astype(np.uint8)
    seen = dataclasses.replace(pictures, photos=[Image.fromarray(columns)])
    rng = np.random.default_rng(0)
    ranges = {part: [np.array(seen.ground(part, rng)) for _ in range(20)] for part in SIZES}
    ends = {part: (min(map(np.min, found)), max(map(np.max, found))) for part, found in ranges.items()}
    assert ends["train"][1] < ends["validation"][0] and ends["validation"][1] < ends["test"][0]


def test_packages_are_checked_and_a_missing_network_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "shapes-1.0.0.tgz", "w:gz") as archive:
        for name in ("package/img/64/a.png", "package/img/sheet.png"):
            archive.addfile(tarfile.TarInfo(name))
    content = hashlib.sha256((tmp_path / "shapes-1.0.0.tgz").read_bytes()).hexdigest()
    table = tmp_path / "table"
    table.write_text(f"{content}  shapes-1.0.0.tgz\n")
    assert domains.fetch(tmp_path, table) == tmp_path / "unpacked"
    assert [file.name for file in (tmp_path / "unpacked" / "shapes").rglob("*.png")] == ["a.png"]
    table.write_text(f"{content}  other-1.0.0.tgz\n")
    (tmp_path / "other-1.0.0.tgz").write_bytes(b"spoiled")
    with pytest.raises(BadConfig, match=r"other-1.0.0.tgz has the SHA-256 \w+ instead of \w+; delete it"):
        domains.fetch(tmp_path, table)
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    table.write_text(f"{content}  stamps_1%3a2.0-1_all.deb\n")
    with pytest.raises(
        BadConfig, match=r"'apt-get download stamps=1:2.0-1' \(E: no network\); run it .* copy the file"
    ):
        domains.fetch(tmp_path, table)


PAIRS = (("a", "b"), ("c", "d"))


class Contradicting:
    """A `RunCache` in which every training takes two seconds; contradicting domains miss their thresholds together."""

    conflict_cost = 0.02

    def __call__(self, adapter: Any) -> TrainingResult:
        low = {name for pair in PAIRS if set(pair) <= set(adapter) for name in pair}
        return TrainingResult({name: Score(*[0.1 if name in low else 1.0] * 2) for name in adapter}, 2.0)

    together = __call__

    def join(self, before: History, beside: Any, domain: str) -> TrainingResult:
        return self((*beside, domain))

    def conflicts(self, history: History, domains: Any) -> dict[frozenset[str], float]:
        return {frozenset(pair): 0.5 for pair in PAIRS if set(pair) <= set(domains)}


def test_a_training_is_counted_once_in_single_domain_trainings() -> None:
    cache: Any = Contradicting()
    meter = packing_bench.Meter(cache)
    for _ in range(2):
        meter(("a",))
        meter.together(["a"])  # the same as in sequence
        meter(("a", "b"))
        meter.together(["b", "a", "c"])
        meter.join(History(("a", "b", "c")), ("a",), "b")
    assert meter.trainings == 1 + 1 + 3 + 1 and meter.seconds == 2 * 4
    meter.conflicts(History(("a", "b")), ["a", "b"])
    assert meter.trainings == pytest.approx(6.04) and 8 < meter.seconds < 9


def a_table(seed: int, packed: float) -> dict[str, Any]:
    def method(adapters: int, a: float, b: float) -> dict[str, Any]:
        return {"adapters": adapters, "trainings": 3.5, "training s": 9.0, "test": {"a": a, "b": b}}

    return {
        "seed": seed,
        "thresholds": {"a": 0.8, "b": 0.7},
        "methods": {
            packing_bench.ALONE: method(2, 0.9, 0.9),
            packing_bench.ALL: method(1, 0.9, 0.5),
            packing_bench.DEFAULT: method(3, packed, 0.75),
            packing_bench.NAIVE: method(2, 0.5, 0.6),
            packing_bench.PACKED: method(2, 0.85, 0.8),
            packing_bench.JOINTLY: method(1, 0.85, 0.8),
            packing_bench.OPTIMUM: method(1, 0.85, 0.8),
        },
        "missed alone": [],
        "lower bound": 2,
    }


def results(*tables: dict[str, Any]) -> dict[str, Measured]:
    return {f"table-{place}": Measured([], {"tables": each}) for place, each in enumerate(tables)}


def test_missed_thresholds_are_counted_on_test_data(tmp_path: Path) -> None:
    def goals(*tables: dict[str, Any]) -> Any:
        return packing_bench.goals(packing_bench.combine(results(*tables)))

    tables = [a_table(seed, 0.81 if seed else 0.79) for seed in (0, 1, 2)]
    first = packing_bench.combine(results(*tables))
    rows = [row for row in first.rows if row["method"] == packing_bench.DEFAULT]
    assert [(row["seed"], row["broken"], round(row["worst"], 3)) for row in rows] == [
        (0, 1, -0.01),
        (1, 0, 0.01),
        (2, 0, 0.01),
    ]
    assert [row["a"] for row in first.rows if row["method"] == "(threshold)"] == [0.8] * 3
    more, cost, broken, all_in_one = goals(*tables)
    assert (more.value, cost.value, broken.value, all_in_one.value) == (2, pytest.approx(1.75), 1, 1)
    assert (more.goal, cost.goal, all_in_one.goal, all_in_one.at_most) == (1, 2, 1, False)
    assert broken.goal == pytest.approx(0.3) and "of 6 at 0.95" in broken.name
    tables[0]["missed alone"] = ["a"]  # it counts, too
    assert goals(*tables)[2] == broken
    for table in tables:  # beyond six domains the lower bound stands for the optimum
        del table["methods"][packing_bench.OPTIMUM]
    assert goals(*tables)[0].value == 1


def numbers(lora: LoraPlan) -> int:
    """Two layers of the embedded model's widths: one sharded by outputs, one by inputs."""
    return lora.rank * (256 + 640 // lora.blocks) + lora.rank * (640 // lora.blocks + 256)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_no_other_rank_has_a_parameter_count_nearer_to_the_loras(blocks: int) -> None:
    rank = adapters.matched_rank(numbers, blocks)
    wanted = numbers(LoraPlan(rank=adapters.RANK))
    found = abs(numbers(LoraPlan(rank=rank, blocks=blocks)) - wanted)
    assert rank % blocks == 0 and (rank == adapters.RANK if blocks == 1 else rank > adapters.RANK)
    for other in (rank - blocks, rank + blocks):
        assert abs(numbers(LoraPlan(rank=other, blocks=blocks)) - wanted) >= found


def test_samples_are_encoded_before_a_training_is_timed(base: str) -> None:
    plan, splits = small.plan_of(base, ("colors",)), {"colors": small.color_splits()}
    trainer = adapters.trainer_of(plan, small.trainer_of(plan, splits).adapter.base, splits)
    assert vars(trainer.domains["colors"]).keys() >= {"train", "validation", "test"}
