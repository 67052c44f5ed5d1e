"""Complete runs: killed and resumed, on user data, and as accurate in the engine and in `vlora serve` as reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import AutoModelForImageTextToText

from fusion.packing.algorithm import Packing, Score
from fusion.plan.schema import Plan
from fusion.progress import Progress, ProgressCallback
from fusion.run import fuse, packing_of
from fusion.training.checkpoint import Checkpoint
from fusion.training.collator import EncodedSample
from fusion.training.objectives import HeadObjective
from fusion.training.parallel_jobs import Job, one_thread, run_in_parallel
from fusion.training.run_cache import RunCache
from fusion.training.scoring import Evaluator
from heads import Answer, load_heads
from tests.fusion.made import load_plan, picture, video, write_plan
from tests.fusion.mixed_plan import served_scores, write_mixed_plan
from tests.fusion.small import COLORS, inputs, plan_of, value_of, write_folders
from tests.processes import KillingItself, in_child, until
from tests.server.served import ROOT, served
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadConfig, BadPlan
from vlora.models.processing import InputProcessor
from vlora.run_folder import lock_folder
from vlora.types import Request

# -- killed at any file operation, with a trainer that only counts -----------------------------------------------------

NAMES = ("a", "b", "c", "d")


class Counting:
    """A `LoraTrainer` whose weights are a hash of what was trained; b does not fit beside a, and d into nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.adapter = self.evaluator = self
        self.domains = {name: SimpleNamespace(train=(name,), validation=[name], test={name}) for name in NAMES}
        self.reset()

    def reset(self) -> None:
        self.value, self.held = plan_seed(self.plan), list[str]()

    def snapshot(self) -> dict[str, torch.Tensor]:
        heads = {f"head.{name}.weight": torch.tensor([zlib.crc32(name.encode())]) for name in self.held}
        return {"lora.x": torch.tensor([self.value]), **heads}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.value = int(state["lora.x"])
        self.held = [key.split(".")[1] for key in state if key.startswith("head.")]

    def train_together(self, domains: Sequence[str]) -> tuple[float, ...]:
        self.value = zlib.crc32(f"{self.value} {domains}".encode())
        self.held = list(dict.fromkeys((*self.held, *domains)))
        return (float(self.value),)

    def train(self, domain: str, beside: Sequence[str], *, rehearsal: float) -> tuple[float, ...]:
        assert set(beside) <= set(self.held), "it continues from the adapter that holds them"
        return self.train_together((domain,))

    def gradients(self, domains: Sequence[str], batches: int) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([1.0, -2.0 * (name == "b")]) for name in domains}

    def bounded_score(self, name: str, samples: object) -> Score:
        assert samples is self.domains[name].validation
        low = name == "d" or (name == "b" and "a" in self.held)
        return Score(0.9, 0.3 if low else 0.9 - self.value / 2**36)


def plan_seed(plan: Plan) -> int:
    return zlib.crc32(str(plan.seed).encode())


def plan_for(packing: str, **first_fit: object) -> Plan:
    """A plan of four domains; first_fit: its fields for that way of packing."""
    fields = first_fit if packing == "first_fit" else {}
    return plan_of("x", NAMES).model_copy(update={"packing": packing, **fields})


def pack(folder: Path, plan: Plan, die_at: int | None = None, places: Path | None = None) -> Packing:
    """Pack the domains of a plan, resuming what the folder has.

    Args:
        folder: Of the trainings.
        plan: See `plan_for`.
        die_at: The number of the file operation at which the process kills itself.
        places: A file for the number of all of them.
    """
    killing = KillingItself(folder, die_at) if die_at is not None or places is not None else None
    trainer: Any = Counting(plan)
    cache = RunCache(trainer, Checkpoint(folder, resume=True), inputs(*NAMES), rehearsal=0.5)
    found = packing_of(plan, trainer.domains, dict.fromkeys(NAMES, 0.5), cache, lambda line: None)
    if places is not None and killing is not None:
        places.write_text(str(killing.count))
    return found


def stored(folder: Path) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Weights and scores of the trainings in a folder, without durations."""
    found = {}
    for place in folder.iterdir():
        if place.is_dir():
            told = json.loads((place / "trained.json").read_text())
            del told["seconds"]
            found[place.name] = (place / "state.safetensors").read_bytes(), told
    return found


@pytest.mark.parametrize(
    "packing",
    ["guided", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("naive", "first_fit", "jointly"))],
)
def test_a_packing_killed_at_any_file_operation_gives_the_same_adapters(tmp_path: Path, packing: str) -> None:
    plan = plan_for(packing, order=("given", "random"))
    assert in_child(pack, tmp_path / "whole", plan, None, tmp_path / "places") == 0
    wanted, num_places = stored(tmp_path / "whole"), int((tmp_path / "places").read_text())
    result = pack(tmp_path / "whole", plan)
    assert list(result.missed) == ["d"] and len(wanted) >= 4 and num_places > 30
    for die_at in range(1 + len(packing) % 11, num_places + 1, 11):
        folder = tmp_path / str(die_at)
        assert os.WIFSIGNALED(in_child(pack, folder, plan, die_at))
        again = pack(folder, plan)
        assert stored(folder) == wanted, f"killed at place {die_at} of {num_places}"
        assert {adapter: one.scores for adapter, one in again.adapters.items()} == {
            adapter: one.scores for adapter, one in result.adapters.items()
        }
        assert not list(folder.glob("unfinished*"))


@pytest.mark.parametrize("packing", ["first_fit", "jointly"])
def test_trainings_in_parallel_give_the_packing_of_those_in_sequence(tmp_path: Path, packing: str) -> None:
    """Forks store what they train: this process trains nothing once more."""
    plan, sizes = plan_for(packing, order=("given", "random", "random"), seed=1), list[int]()
    wanted = pack(tmp_path / "alone", plan)
    trainer: Any = Counting(plan)
    cache = RunCache(trainer, Checkpoint(tmp_path / "together", resume=True), inputs(*NAMES), rehearsal=0.5)

    def run_ahead(jobs: Mapping[Job, object]) -> None:
        sizes.append(len(jobs))
        run_in_parallel([*jobs], 2, Progress())
        if packing == "first_fit":
            trainer.train = trainer.train_together = pytest.fail

    thresholds = dict.fromkeys(NAMES, 0.5)
    with one_thread():
        found = packing_of(plan, trainer.domains, thresholds, cache, lambda line: None, run_ahead)
    assert sizes[0] >= 2 and list(found.missed) == ["d"]
    assert {name: one.scores for name, one in found.adapters.items()} == {
        name: one.scores for name, one in wanted.adapters.items()
    }
    alone, together = stored(tmp_path / "alone"), stored(tmp_path / "together")
    assert together == alone if packing == "jointly" else alone.items() <= together.items()


# -- a real run in processes that are killed ---------------------------------------------------------------------------


def write_killed_plan(folder: Path, base: str) -> Path:
    domains = {"colors": ("what color ?", 0.05), "others": ("what is it ?", 0.05), "chance": ("which one ?", 0.95)}
    rows = (
        f'  - {{name: {name}, source: {name}, question: "{question}", threshold: {threshold}}}\n'
        for name, (question, threshold) in domains.items()
    )
    (folder / "plan.yaml").write_text(
        f"base: {base}\npacking: first_fit\nconfidence: null\ntraining: {{steps: 4, batch_size: 4}}\n"
        f"lora: {{rank: 2}}\ndomains:\n{''.join(rows)}"
    )
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("resume")
    write_folders(folder / "colors")
    write_folders(folder / "others", tuple(reversed(COLORS)))
    write_folders(folder / "chance", by_chance=True)  # cannot be learned: rolled back, and misses its threshold alone
    yield folder
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001  # it would outlive these tests


def fuse_to_the_end(plan: Path, out: Path) -> None:
    torch.set_num_threads(1)
    fuse(plan, out, resume=True, oracle=True, console=Console(quiet=True))


def files(folder: Path) -> dict[str, bytes]:
    found = (file for file in sorted(folder.rglob("*")) if file.suffix in (".safetensors", ".json"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def report_of(out: Path) -> dict[str, Any]:
    """The report without durations."""
    told: dict[str, Any] = json.loads((out / "report.json").read_text())
    del told["seconds"]
    for step in told["timeline"]:
        del step["begin"], step["seconds"]
    return told


def num_trained(out: Path) -> int:
    return len(list((out / "checkpoint").glob("*/trained.json")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_gives_the_same_adapters(made: Path, base: str) -> None:
    plan, whole, out = write_killed_plan(made, base), made / "whole", made / "killed"
    fuse_to_the_end(plan, whole)
    assert num_trained(whole) == 6  # four to pack; one more alone and one together for the oracle
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=fuse_to_the_end, args=(plan, out))
    process.start()
    until(lambda: num_trained(out) >= 2 or not process.is_alive())
    time.sleep(random.Random(0).random() * 0.2)  # at a random point of the next work
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0) and num_trained(out) >= 2
    kept = {file: file.stat().st_mtime_ns for file in out.glob("checkpoint/*/trained.json")}
    fuse_to_the_end(plan, out)
    assert num_trained(out) == 6 and all(file.stat().st_mtime_ns == written for file, written in kept.items())
    assert files(out / "adapters") == files(whole / "adapters") and report_of(out) == report_of(whole)
    optimum = {"optimum": [["colors", "others"], ["chance"]], "lower_bound": 2}
    assert report_of(out)["oracle"] == {"missed": ["chance"], "conflicts": [], **optimum}
    assert any("others" in file.read_text() for file in (out / "adapters").glob("*/README.md"))
    good = plan.read_text()
    with pytest.raises(BadConfig, match="--restart"):
        fuse(plan, out)
    for asked, instead, message in (
        ("{rank: 2}", "{rank: 2, targets: [p_proj]}", "p_proj"),  # a linear layer that the base lacks
        ('"what color ?"', f'"{"what " * 5000}?"', "tokens"),  # more tokens than the base has positions
    ):
        plan.write_text(good.replace(asked, instead))
        with pytest.raises(BadPlan, match=message):
            fuse(plan, out, restart=True)
        assert num_trained(out) == 6, "a refused plan deletes nothing of an earlier run"


# -- user data ---------------------------------------------------------------------------------------------------------


def half(frames: list[object]) -> tuple[str, float]:
    """A teacher that always gives the same answer with a confidence of 0.5."""
    return "a red thing", 0.5


def test_from_files_to_adapters(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures decoded on demand, videos, and a teacher's labels; one base model in memory."""
    load, loaded = AutoModelForImageTextToText.from_pretrained, list[str]()

    def counted(name: str, **settings: Any) -> object:
        loaded.append(name)
        return load(name, **settings)

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", counted)
    for number in range(8):
        for place, label in enumerate(("left", "right")):
            video(tmp_path / "videos" / label / f"{number}.avi", 2 * number + place)
        picture(tmp_path / "pictures" / f"{number}.png", number, size=(40, 60))
    plan = write_plan(
        tmp_path,
        "data: {format: video_folder, path: videos, frames: 2}",
        "task: captioning\ndata: {format: unlabelled, path: pictures}\n"
        "teacher: {kind: callable, function: 'tests.fusion.test_runs:half', allow_code: true}",
        more=f"base: {base}\ntraining: {{steps: 2, batch_size: 4}}\n",
    )
    with lock_folder(tmp_path / "out"), pytest.raises(BadConfig, match="in use by process"):
        fuse(plan, tmp_path / "out", console=Console(quiet=True))
    report = fuse(plan, tmp_path / "out", console=Console(quiet=True))
    assert loaded == [base]
    assert [(domain.task, domain.num_test) for domain in report.domains] == [("action", 2), ("captioning", 1)]
    action, captioning = report.domains
    assert action.words is not None and 0 <= action.words <= 1 and captioning.words is None, "heads only"
    labels = json.loads((tmp_path / "out" / "test" / "domain0" / "labels.json").read_text())
    assert {entry["label"] for entry in labels} == {"left", "right"} and len(labels[0]["frames"]) == 2
    assert sorted(path.name for path in (tmp_path / "out" / "adapters").iterdir())


TASKS = ("binary", "counting", "multi_label", "regression", "detection")


def write_squares(folder: Path) -> list[str]:
    """Pictures with up to two squares, and their answers by task. Returns the lines of a plan for each task."""
    rows: dict[str, list[dict[str, str]]] = {task: [] for task in TASKS[:-1]}
    kinds = [{"id": 1, "name": "blue"}, {"id": 2, "name": "green"}]
    content: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": kinds}
    for number in range(32):
        rng = np.random.default_rng(number)
        names = [name for place, name in enumerate(("blue", "green")) if (number >> place) % 2]
        pixels, sizes, file = rng.integers(0, 60, (64, 64, 3)).astype(np.uint8), 0, f"{number}.png"
        for name in names:
            left, size = 4 + 32 * (name == "green"), int(rng.integers(10, 24))
            pixels[8 : 8 + size, left : left + size, ("blue", "green").index(name)] += 180
            sizes += size
            entry = {"id": 2 * number + (name == "green"), "image_id": number, "bbox": [left, 8, size, size]}
            content["annotations"].append({**entry, "category_id": 1 + (name == "green")})
        (folder / "pictures").mkdir(exist_ok=True)
        assert cv2.imwrite(str(folder / "pictures" / file), pixels)
        content["images"].append({"id": number, "file_name": file, "width": 64, "height": 64})
        answers = ("yes" if "blue" in names else "no", str(len(names)), ";".join(names), str(sizes))
        for task, answer in zip(rows, answers, strict=True):
            rows[task].append({"image": file, "answer": answer})
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "boxes.json").write_text(json.dumps(content))
    more = "images: pictures, split: {validation: 0.25, test: 0.25}"
    formats = [*(f"format: questions, path: {task}.jsonl" for task in rows), "format: coco, path: boxes.json"]
    return [f"task: {task}\ndata: {{{one}, {more}}}" for task, one in zip(TASKS, formats, strict=True)]


@pytest.mark.slow
def test_every_head_answers_in_the_engine_as_in_training(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so that no answer may differ: the engine gives the report's test scores, and the calibrated head's
    answer and confidence for each sample."""
    answers: dict[str, list[Answer]] = {}
    evaluate = Evaluator.answers

    def record(self: Evaluator, name: str, samples: Sequence[EncodedSample], *update: ProgressCallback) -> list[object]:
        with torch.no_grad():
            served = self.calibrated(name)
            assert isinstance(served, HeadObjective)
            batches = [outputs for _, outputs in self.forward(name, samples)]
            rows = [logits for outputs in batches for logits in served.logits(outputs, self.adapter.heads[name])]
        grids = [own for outputs in batches for own in outputs.grids]
        if samples is self.adapter.domains[name].test:
            answers[name] = [served.task.decode(*one) for one in zip(rows, grids, strict=True)]
        return evaluate(self, name, samples, *update)

    monkeypatch.setattr(Evaluator, "answers", record)
    # No head reaches its threshold in so few steps, so each domain has its own adapter.
    domains = (f"threshold: 1.0\n{lines}" for lines in write_squares(tmp_path))
    training = "{steps: 4, batch_size: 6, bfloat16: false, learning_rate: 0.01}"
    plan = write_plan(tmp_path, *domains, more=f"base: {base}\ntraining: {training}\n")
    report = fuse(plan, tmp_path / "out", console=Console(quiet=True))
    assert [domain.task for domain in report.domains] == list(TASKS)
    data = load_plan(plan)
    engine = LocalEngine(EngineConfig(model=base, dtype="float32", arena_bytes=64 * 2**20))
    processor = InputProcessor.from_pretrained(base)
    for adapter in report.adapters:
        engine.engine.load_adapter(adapter.name, str(tmp_path / "out" / "adapters" / adapter.name))
    for domain in report.domains:
        served_task = load_heads(tmp_path / "out" / "adapters" / domain.adapter)[domain.name].task
        assert served_task.kind == domain.task
        requests, samples = [], data[domain.name].splits.test
        for number, sample in enumerate(samples):
            images = [Image.fromarray(frame) for frame in sample.frames]
            encoded = processor.encode(processor.chat("what is it ?", 1), images)
            fields = {"adapter": domain.adapter, "head": domain.name, "vision": encoded.vision}
            requests.append(Request(request_id=str(number), prompt_ids=encoded.prompt_ids, **fields))  # type: ignore[arg-type]
        outputs = engine.run(requests)
        heads = [outputs[request.request_id][-1].head for request in requests]
        metrics = served_task.metrics([value_of(head) for head in heads], [sample.target for sample in samples])
        assert metrics[domain.metric] == pytest.approx(domain.after), domain.name
        for head, expected in zip(heads, answers[domain.name], strict=True):
            assert head is not None and head.label == expected.label
            assert head.confidence == pytest.approx(expected.confidence, abs=1e-4)
            assert head.scores == pytest.approx(expected.scores, abs=1e-4)
            assert head.values == pytest.approx(expected.values, abs=1e-3)


# -- the accuracy in `vlora serve` -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes, each with its own imports
@pytest.mark.parametrize(
    ("family", "lora", "learned"),
    [
        ("qwen2_5_vl", "rank: 4", ("colors", "words", "squares")),
        ("qwen3_vl", "rank: 4", ("colors", "words", "squares")),
        ("qwen2_vl", "rank: 4", ("colors", "words", "squares")),
        ("qwen2_5_vl", "rank: 4, activated: true", ("colors", "words")),  # a grid reads the base model's hidden states
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "activated"],
)
def test_a_qwen_base_serves_with_the_reported_accuracy(
    tmp_path: Path, family: str, lora: str, learned: Collection[str]
) -> None:
    """The scores of all test samples. learned: domains that score above 0."""
    plan, out = write_mixed_plan(tmp_path / "plan", family, lora=lora), tmp_path / "out"
    run = [sys.executable, "-m", "vlora.cli", "fuse", str(plan), "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    with served("--model", str(plan.parent / "base"), "--adapters", str(out / "adapters"), "--dtype", "float32") as on:
        scores = served_scores(on.client, plan, report)
    reported = {one["name"]: (one["after"], one["words"]) for one in report["domains"]}
    assert scores == {name: pytest.approx(both) for name, both in reported.items()}
    assert all(reported[name][0] > 0 for name in learned), reported
    assert any(0 < after < 1 for after, _ in reported.values()), "the comparison shows nothing if all are right"
    assert {one["task"] for one in report["domains"]} == {"classification", "vqa", "detection"}
    if "activated" in lora:
        tokenizer = InputProcessor.from_pretrained(str(plan.parent / "base")).tokenizer
        for adapter in report["adapters"]:
            config = json.loads((out / "adapters" / adapter["name"] / "adapter_config.json").read_text())
            assert tokenizer.decode(config["alora_invocation_tokens"]) == "answer", "what the template adds"
