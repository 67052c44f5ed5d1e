"""A plan that changes between runs: what is trained again, and that all else is reused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from fusion.packing.algorithm import Adapter, History, Score, TrainingResult
from fusion.run import fuse, preview
from fusion.training import frozen_base, session
from fusion.training.checkpoint import Checkpoint
from fusion.training.frozen_base import FrozenBase, load_frozen_base
from fusion.training.run_cache import RunCache
from tests.fusion.small import COLORS, write_base, write_folders
from vlora.errors import BadAdapter
from vlora.lora.peft_format import read_config
from vlora.models.vision.encoder import VisionEncoder

Plan = dict[str, object]
DOMAIN = '  - {{name: {name}, source: {folder}/{source}, question: "{question}", threshold: {threshold}}}\n'
ONE = {"name": "colors", "source": "colors", "question": "what color ?", "threshold": 0.05}
OTHER = {"name": "others", "source": "others", "question": "what is it ?", "threshold": 0.05}
NEW = {"name": "new", "source": "new", "question": "which one ?", "threshold": 0.05}
TOGETHER = "together: colors, others"
JOINED = f"{TOGETHER}; rehearsal 0.5: new into colors, others"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and the run `out` of a plan with two domains in one adapter."""
    folder = tmp_path_factory.mktemp("changed")
    write_base(folder / "base")
    write_folders(folder / "colors")
    write_folders(folder / "others", tuple(reversed(COLORS)))
    write_folders(folder / "new", by_chance=True)
    run(folder, folder / "out", [ONE, OTHER])
    return folder


def write_plan(folder: Path, domains: list[Plan], steps: int = 4, confidence: str = "null") -> Path:
    file = folder / "plan.yaml"
    file.write_text(
        f"base: {folder}/base\nconfidence: {confidence}\nlora: {{rank: 2}}\n"
        f"training: {{batch_size: 4, steps: {steps}}}\ndomains:\n"
        + "".join(DOMAIN.format(folder=folder, **domain) for domain in domains)
    )
    return file


def run(folder: Path, out: Path, domains: list[Plan], *settings: Any) -> str:
    """What a resumed run prints."""
    console = Console(file=io.StringIO(), width=200)
    fuse(write_plan(folder, domains, *settings), out, resume=True, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def trainings(out: Path) -> dict[str, str]:
    """By folder, what was trained."""
    return {
        file.parent.name: json.loads(file.read_text())["what"] for file in (out / "checkpoint").glob("*/trained.json")
    }


def new_trainings(out: Path, before: dict[str, str]) -> set[str]:
    return {what for key, what in trainings(out).items() if key not in before}


def adapters(out: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((out / "adapters").rglob("adapter_model.safetensors"))]


def relabel(folder: Path, source: str, part: str) -> None:
    picture = min((folder / source / part).rglob("*.png"))
    other = max(one for one in (folder / source / part).iterdir() if one != picture.parent)
    picture.rename(other / f"moved-{picture.name}")


class Change(NamedTuple):
    """A changed plan, or a changed label (`edit`: source and part). trained: what is trained for it. encoded: domains
    whose samples are encoded. said: the reason. measured: how many values are measured again, if adapters stay.
    """

    domains: list[Plan]
    trained: set[str] = frozenset()  # type: ignore[assignment]
    encoded: set[str] = frozenset()  # type: ignore[assignment]
    said: str = ""
    steps: int = 4
    confidence: str = "null"
    edit: tuple[str, str] | None = None
    measured: int | None = None


ALL_THREE, BOTH = {"colors", "others", "new"}, {"colors", "others"}
TAKEN = {"together: colors, new; rehearsal 0.5: others into colors, new"}
CHANGES = {
    "nothing": Change([ONE, OTHER], measured=0),
    "thresholds": Change([ONE | {"threshold": 0.01}, OTHER | {"threshold": 0.06}], measured=0),
    "order": Change([OTHER, ONE]),
    "confidence": Change([ONE, OTHER], encoded=BOTH, confidence="0.6", measured=2),
    "removed": Change([OTHER]),
    "added": Change([ONE, OTHER, NEW], {JOINED}, ALL_THREE, "not new: it is new"),
    "added, unfit": Change([ONE, OTHER, NEW | {"threshold": 1.0}], {JOINED, "alone: new"}, ALL_THREE),
    "renamed": Change([ONE, OTHER | {"name": "new"}], said="domains are of: colors, new", measured=0),
    "names exchanged": Change([ONE | {"name": "others"}, OTHER | {"name": "colors"}]),
    "renamed, its name taken": Change(
        [ONE, OTHER | {"name": "new"}, NEW | {"name": "others"}],
        TAKEN,
        ALL_THREE,
        "not others: training data, question changed",
    ),
    "question": Change([ONE, OTHER | {"question": "which is it ?"}], {TOGETHER}, BOTH, "not others: question changed"),
    "setting": Change([ONE, OTHER], {TOGETHER}, BOTH, "no stored training is reused: training.steps changed", steps=5),
    "training label": Change(
        [ONE, OTHER], {TOGETHER}, BOTH, "not others: training data changed", edit=("others", "train")
    ),
    "validation label": Change([ONE, OTHER], encoded={"others"}, edit=("others", "validation"), measured=3),
}
SOON = ("thresholds", "renamed, its name taken", "added, unfit", "training label", "validation label")


@pytest.mark.parametrize(
    "change", [one if one in SOON else pytest.param(one, marks=pytest.mark.exhaustive) for one in CHANGES]
)
def test_only_what_a_change_affects_is_done(
    made: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains, trained, encoded, reason, steps, confidence, edit, measured = CHANGES[change]
    shutil.copytree(made, folder := tmp_path / "made")
    if edit is not None:
        relabel(folder, *edit)
    out = folder / "out"
    before, weights, values = trainings(out), adapters(out), len([*out.glob("checkpoint/*/*.json")])
    used: set[str] = set()
    computed: set[str] = set()
    encode, compute = FrozenBase.encode_samples, VisionEncoder.encode
    name_of = {str(domain["question"]): str(domain["name"]) for domain in domains}

    def encode_samples(self: FrozenBase, question: str, *args: Any) -> Any:
        used.add(name_of[question])
        return encode(self, question, *args)

    def compute_features(self: VisionEncoder, tasks: Any) -> Any:
        computed.update(task.item.content_hash for task in tasks)
        return compute(self, tasks)

    monkeypatch.setattr(FrozenBase, "encode_samples", encode_samples)
    monkeypatch.setattr(VisionEncoder, "encode", compute_features)
    stored = len([*out.glob("features/*")])
    said = run(folder, out, domains, steps, confidence)
    assert new_trainings(out, before) == trained, said
    assert reason in said and used == encoded
    assert len(computed) == (stored if NEW["source"] in [one["source"] for one in domains] else 0), "of new pictures"
    if measured is not None:
        assert adapters(out) == weights
        assert len([*out.glob("checkpoint/*/*.json")]) == values + measured


def test_features_of_removed_domains_and_of_killed_processes_are_removed(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", out := tmp_path / "out")
    before = {file.name for file in out.glob("features/*")}
    run(made, out, [ONE, OTHER, NEW | {"threshold": 1.0}])
    (out / "features" / "unfinished-1-features").touch()
    (out / "features" / f"{0:064x}.safetensors").touch()
    assert len([*out.glob("features/*")]) == 2 * len(before) + 2
    run(made, out, [ONE, OTHER])
    assert {file.name for file in out.glob("features/*")} == before
    shutil.copytree(out, other := tmp_path / "other")
    shutil.rmtree(out / "features")
    for folder in (out, other):
        run(made, folder, [ONE, OTHER], 5)
    assert adapters(out) == adapters(other), "deleted features are computed again"
    assert {file.name for file in out.glob("features/*")} == before


@pytest.mark.parametrize("restart", [False, True], ids=["another base", "restart"])
def test_a_run_begins_without_features_that_it_will_not_use(
    made: Path, tmp_path: Path, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made, folder := tmp_path / "made")
    former = {*(out := folder / "out").glob("features/*")}
    encode, seen = VisionEncoder.encode, list[set[Path]]()

    def encode_and_look(self: VisionEncoder, tasks: Any) -> Any:
        seen.append({*out.glob("features/*")})
        return encode(self, tasks)

    if not restart:
        config = json.loads((folder / "base" / "config.json").read_text())
        config["vision_config"]["layer_norm_eps"] = 0.1
        (folder / "base" / "config.json").write_text(json.dumps(config))
        dry_run(folder, out, [ONE, OTHER])
        assert {*out.glob("features/*")} >= former
    monkeypatch.setattr(VisionEncoder, "encode", encode_and_look)
    fuse(
        write_plan(folder, [ONE, OTHER]), out, resume=not restart, restart=restart, console=Console(file=io.StringIO())
    )
    assert not seen[0] and (restart or former.isdisjoint(set().union(*seen)))
    assert len({*out.glob("features/*")}) == len(former)


def test_a_domain_that_missed_its_threshold_is_not_tried_again(made: Path, tmp_path: Path) -> None:
    out, unfit = tmp_path / "out", NEW | {"threshold": 1.0}
    shutil.copytree(made / "out", out)
    run(made, out, [ONE, OTHER, unfit])
    before = trainings(out)
    run(made, out, [ONE | {"question": "which color ?"}, OTHER, unfit])
    assert new_trainings(out, before) == {TOGETHER}


@pytest.fixture
def no_join_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    join = RunCache.join

    def unfit(self: RunCache, before: History, beside: Adapter, domain: str) -> TrainingResult:
        trained = join(self, before, beside, domain)
        return dataclasses.replace(trained, scores={**trained.scores, domain: Score(0.0, 0.0)})

    monkeypatch.setattr(RunCache, "join", unfit)


@pytest.mark.usefixtures("no_join_fits")
def test_a_domain_that_joins_no_adapter_is_packed_as_from_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", out := tmp_path / "out")
    before = trainings(out)
    said = run(made, out, [ONE, OTHER, NEW])
    assert "2 adapters, 1 more than before: packing from the beginning, which may need fewer" in said
    assert new_trainings(out, before) == {JOINED, "alone: new", "together: colors, new, others"}
    run(made, whole := tmp_path / "whole", [ONE, OTHER, NEW])
    assert len(adapters(out)) == 1 and adapters(out) == adapters(whole)
    done = trainings(out)
    run(made, out, [ONE, OTHER, NEW])
    assert trainings(out) == done and adapters(out) == adapters(whole)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_join_fits")
def test_a_replaced_domain_with_its_own_adapter_is_no_growth(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", out := tmp_path / "out")
    run(made, out, [ONE, OTHER, NEW | {"threshold": 1.0}])  # in an adapter of its own, where it then suffices
    run(made, out, [ONE, OTHER, NEW])
    assert len(adapters(out)) == 2
    before = trainings(out)
    said = run(made, out, [ONE, OTHER, NEW | {"question": "which of them ?"}])
    assert new_trainings(out, before) == {JOINED, "alone: new"}
    assert len(adapters(out)) == 2 and "from the beginning" not in said


def test_forks_encode_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made / "out", out := tmp_path / "out")
    encode, encoded_by = FrozenBase.encode_samples, tmp_path / "encoded_by"

    def encode_samples(*args: Any) -> Any:
        with encoded_by.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return encode(*args)

    monkeypatch.setattr(FrozenBase, "encode_samples", encode_samples)
    alone = {"threshold": "{relative_to: alone, minus: 0.9}"}
    plan, console = write_plan(made, [ONE | alone, OTHER | alone]), Console(file=io.StringIO(), width=200)
    fuse(plan, out, resume=True, workers=2, console=console)
    assert "running 2 trainings in parallel" in console.file.getvalue()  # type: ignore[attr-defined]
    assert {"alone: colors", "alone: others"} <= {*trainings(out).values()}
    assert {*encoded_by.read_text().split()} == {str(os.getpid())}
    encoded_by.unlink()
    fuse(plan, out, resume=True, workers=2, console=console)
    assert not encoded_by.exists(), "everything is stored"


def test_a_changed_run_that_is_killed_ends_with_the_same_adapters(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    domains = [ONE, OTHER, NEW | {"threshold": 1.0}]
    for out in (whole, killed):
        shutil.copytree(made / "out", out)
    run(made, whole, domains)
    keep, lives = Checkpoint.keep, [0, 1, 5]

    def keep_or_die(*args: Any) -> None:
        if lives[0] == 0:
            raise KeyboardInterrupt
        lives[0] -= 1
        keep(*args)

    monkeypatch.setattr(Checkpoint, "keep", keep_or_die)
    while lives:
        with contextlib.suppress(KeyboardInterrupt):
            run(made, killed, domains)
        lives.pop(0)
    assert adapters(killed) == adapters(whole) != adapters(made / "out")
    reports = [json.loads((out / "report.json").read_text())["adapters"] for out in (killed, whole)]
    assert reports[0] == reports[1]


PREVIEWS = {
    "same": ([ONE, OTHER], ["nothing to train: every training is stored; adapters: colors, others"]),
    "added": (
        [ONE, OTHER, NEW],
        [
            "domains are of: colors, others",
            "  not new: it is new",
            "would run: training new into colors, others, about 5 s",
            "in all: about 5 s if each fits, at most 60 s",
        ],
    ),
    "nothing kept": (
        [ONE | {"question": "which color ?"}, OTHER | {"question": "which is it ?"}],
        ["in all: about 10 s if each fits, at most 20 s"],
    ),
    "alone": (
        [ONE, OTHER | {"threshold": "{relative_to: alone, minus: 0.9}"}],
        ["would run: training others into a new adapter, about 5 s", "in all: then packing, at most 45 s"],
    ),
}


@pytest.mark.parametrize("change", PREVIEWS)
def test_a_dry_run_says_what_is_reused_and_how_long_the_rest_takes(made: Path, tmp_path: Path, change: str) -> None:
    domains, lines = PREVIEWS[change]
    shutil.copytree(made / "out", out := tmp_path / "out")
    for file in out.glob("checkpoint/*/trained.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 10}))  # of two domains

    def files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in out.rglob("*") if file.is_file() and file.name != "in-use"}

    before, said = files(), dry_run(made, out, domains)
    assert all(line in said for line in lines) and files() == before, said


def test_without_stored_trainings_a_dry_run_measures_steps(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def load(*args: Any, **options: Any) -> FrozenBase:
        assert not bases, "the memory of one base model must suffice"
        base = load_frozen_base(*args, **options)
        bases.add(base.hf_model.model)
        return base

    monkeypatch.setattr(session, "load_frozen_base", load)
    monkeypatch.setattr(frozen_base, "load_frozen_base", load)
    said = dry_run(made, tmp_path / "out", [ONE, OTHER])
    assert re.search(r"would run: training colors, others at once, about [\d.]+ (s|min)\n", said), said


def dry_run(folder: Path, out: Path, domains: list[Plan]) -> str:
    console = Console(file=io.StringIO(), width=200)
    preview(write_plan(folder, domains), out, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_adapters_have_short_names_and_declare_their_domains(made: Path, tmp_path: Path) -> None:
    place = made / "out" / "adapters" / "fused-1"
    domains = {each["name"]: each for each in json.loads((place / "domains.json").read_text())["domains"]}
    assert [*domains] == ["colors", "others"] and domains["others"]["question"] == "what is it ?"
    report = json.loads((made / "out" / "report.json").read_text())
    for each in report["domains"]:
        own = domains[each["name"]]
        assert own["head"] == each["name"] and own["threshold"] == each["threshold"]
        assert own["head_accuracy"] == pytest.approx(each["validation"]), "the same metric on the same data"
        assert own["answer"] == ("words" if own["head_accuracy"] < own["words_accuracy"] else "head")
    # A domain more does not change the name of the adapter that takes it, nor does another one's place in the plan.
    shutil.copytree(made / "out", out := tmp_path / "out")
    run(made, out, [NEW | {"threshold": 1.0}, OTHER, ONE])
    held = {each["name"]: set(each["domains"]) for each in json.loads((out / "report.json").read_text())["adapters"]}
    assert held == {"fused-1": {"colors", "others"}, "fused-2": {"new"}}
    assert {folder.name for folder in (out / "adapters").iterdir()} == {"fused-1", "fused-2"}


def test_others_can_read_what_a_run_writes(made: Path) -> None:
    os.umask(umask := os.umask(0))
    assert {file.stat().st_mode & 0o777 for file in (made / "out").rglob("*") if file.is_file()} == {0o666 & ~umask}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_an_adapter_that_another_user_keeps_to_himself_is_refused_by_that_reason() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        file = Path(name) / "adapter_config.json"
        file.touch(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(
                BadAdapter, match="permission denied to user 65534: it belongs to user 0, with mode 0600"
            ):
                read_config(Path(name))
        finally:
            os.seteuid(0)
