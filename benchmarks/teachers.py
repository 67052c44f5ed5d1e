"""Small models beside the adapters that replace them: accuracy, latency, and the cost of changing from one to another.

V-LoRA section 3.1 (an adapter is swapped in 15 ms, YOLO in 110 ms, OSCAR in 520 ms, on a GPU) and figure 15. Both are
trained on the same samples of four domains; each seed draws its own data, initial factors and batches. A small model
runs in onnxruntime; an adapter answers with its head, in one pass of the embedded model. All times are of the
processor, with one thread, from decoded pictures to the answer.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.adapters import base_of, cut, plan_of, trainer_of
from benchmarks.merge import MergeableModel
from benchmarks.rivals import RIVALS, SmallModel, export
from fusion.data.samples import Sample, Splits, Target
from fusion.embedded import checkpoint_path
from fusion.plan.schema import LoraPlan
from fusion.synthetic.sources import load_source
from fusion.teachers.onnx_detector import open_session
from fusion.training.objectives import objective_of
from vlora.bench.dummy import half_billion_config, write_adapter
from vlora.bench.harness import Bench, Measured, Results, Store, say
from vlora.bench.plots import Plot
from vlora.bench.report import environment
from vlora.bench.timing import interleaved, median_ms
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadConfig
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.types import Request, SamplingParams

DOMAINS: dict[str, tuple[str, str]] = {
    "detection": ("drawn-traffic-detection", "what is on the road ?"),
    "signs": ("drawn-signs", "what sign is shown ?"),
    "counts": ("drawn-traffic-counts", "how many vehicles are on the road ?"),
    "actions": ("drawn-short-actions", "what happens in the video ?"),
}
"""Source and question, as in `vlora fuse demo`."""

SMALL, ALONE, FUSED = "small model", "adapter of its own", "fused adapter"
METHODS = (SMALL, ALONE, FUSED)
_STEPS, _BATCH = 150, 16
_NUM_TRAIN, _NUM_VALIDATION, _NUM_TEST = 960, 64, 400
_RESAMPLES = 100

_SEEDS = (0, 1)
_CPU = torch.device("cpu")
_ARENA_BYTES = 2**28  # several adapters of the larger model
_RANK = 16  # of the adapters on the larger model
_LARGE_WIDTHS = (64, 128, 256, 512, 1024)  # 6 million weights as float32, 25 MB: between YOLOv8n and YOLOv8s
_TIMES = "times"


def cases(quick: bool) -> dict[str, tuple[str, int, bool]]:
    """Method and seed; then times, of this commit and this machine. quick: one seed, few samples and steps."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise BadConfig("`vlora bench teachers` needs onnxruntime; pip install 'vlora[bench]'") from error
    found = {
        f"{method}, seed {seed}": (method, seed, quick)
        for seed in (_SEEDS[:1] if quick else _SEEDS)
        for method in METHODS
    }
    commit = str(environment()["commit"])[:12]
    return found | {f"{_TIMES}, {platform.node()}, {commit}": (_TIMES, 0, quick)}


def measure(case: tuple[str, int, bool], store: Store) -> Measured:
    method, seed, quick = case
    torch.set_num_threads(1)
    if method == _TIMES:
        return Measured([], measure_times(store.folder / "0", quick))
    job = _Job(seed, quick, store.folder / f"{seed}")
    return Measured([], {"seed": seed, **(job.small_models() if method == SMALL else job.adapters(method))})


def combine(results: Results) -> Measured:
    """A row for each domain."""
    *trained, times = ((name, each.found) for name, each in results.items())
    runs: dict[int, dict[str, Any]] = {}
    for name, result in trained:
        run = runs.setdefault(result["seed"], {"seed": result["seed"]})
        for key, value in result.items():
            if key != "seed":
                run.setdefault(key, {})[name.partition(", seed")[0]] = value
    rows = [_row(name, list(runs.values()), times[1]["latencies"][name]) for name in DOMAINS]
    return Measured(rows, {"switching": times[1]["switching"], "runs": list(runs.values())})


def measure_times(folder: Path, quick: bool) -> dict[str, Any]:
    """Latencies and the cost of switching, with the models of one seed."""
    return {
        "latencies": _latencies(folder, splits_of(0, quick), 5 if quick else 40),
        "switching": _switching(folder, 3 if quick else 15),
    }


def splits_of(seed: int, quick: bool) -> dict[str, Splits]:
    sizes = (64, 16, 24) if quick else (_NUM_TRAIN, _NUM_VALIDATION, _NUM_TEST)
    return {name: cut(load_source(source, seed), *sizes) for name, (source, _) in DOMAINS.items()}


class _Job:
    """The trainings of one seed. Its folder gets `NAME.onnx` and the adapter `NAME/` of each domain."""

    def __init__(self, seed: int, quick: bool, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._seed, self._quick, self._folder, self._splits = seed, quick, folder, splits_of(seed, quick)

    def small_models(self) -> dict[str, Any]:
        scores = {}
        for name, own in self._splits.items():
            rival, file = RIVALS[DOMAINS[name][0]], self._folder / f"{name}.onnx"
            began = time.process_time()
            model = rival.train(own, self._seed, steps=3 if self._quick else None)
            spent = time.process_time() - began
            export(model, own, file)
            scored = self._score(SMALL, name, SmallModel(file, own, threads=1).answers(own.test))
            size = {"parameters": sum(p.numel() for p in model.parameters()), "bytes": file.stat().st_size}
            scores[name] = {**scored, "training cpu s": spent, **size}
        return _by_value(scores)

    def adapters(self, method: str) -> dict[str, Any]:
        """An adapter per domain, which is saved, or one for all domains."""
        plan = plan_of(DOMAINS, self._seed, 3 if self._quick else _STEPS, _BATCH)
        trainer = trainer_of(plan, base_of(), self._splits)
        parameters = sum(p.numel() for p in trainer.adapter.lora.values())
        scores = {}
        for names in [tuple(DOMAINS)] if method == FUSED else [(name,) for name in DOMAINS]:
            trainer.adapter.reset()
            began = time.process_time()
            trainer.train_together(names)
            spent = (time.process_time() - began) / len(names)
            for name in names:
                scored = self._score(method, name, trainer.evaluator.answers(name, trainer.domains[name].test))
                scores[name] = {**scored, "training cpu s": spent, "parameters": parameters}
            if method == ALONE:
                trainer.save(self._folder / names[0], trainer.adapter.snapshot())
        return _by_value(scores)

    def _score(self, method: str, name: str, answers: Sequence[object]) -> dict[str, Any]:
        own = self._splits[name]
        objective, targets = objective_of(own), [sample.target for sample in own.test]
        score = objective.metric(answers, targets)
        say(f"seed {self._seed}, {name}, {method}: {score:.3f}")
        return {
            "metric": objective.metric_name,
            "num_test": len(targets),
            "test": score,
            "standard error": _standard_error(objective.metric, answers, targets),
        }


def _by_value(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{domain: {value: x}} as {value: {domain: x}}."""
    keys = next(iter(scores.values()))
    return {key: {name: own[key] for name, own in scores.items()} for key in keys}


def _standard_error(
    metric: Callable[[Sequence[object], Sequence[Target]], float], answers: Sequence[object], targets: Sequence[Target]
) -> float:
    """Of a score, by resampling the test samples (bootstrap)."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(len(targets), size=len(targets))
        found.append(metric([answers[row] for row in rows], [targets[row] for row in rows]))
    return float(np.std(found))


def _row(name: str, found: Sequence[dict[str, Any]], latency: dict[str, float]) -> dict[str, Any]:
    """A domain's mean scores over seeds, its latencies, and the standard errors of the scores: the larger of that by
    resampling test samples and that between seeds.
    """
    row: dict[str, Any] = {
        "domain": name,
        "metric": found[0]["metric"][SMALL][name],
        "test samples": found[0]["num_test"][SMALL][name],
    }
    for method in METHODS:
        own = [one["test"][method][name] for one in found]
        errors = [one["standard error"][method][name] for one in found]
        sampling = math.sqrt(sum(error**2 for error in errors)) / len(errors)
        between = statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
        row |= {method: statistics.mean(own), f"{method} +-": max(sampling, between)}
    return row | {f"{kind} ms": value for kind, value in latency.items()}


# -- latency ----------------------------------------------------------------------------------------------------------


def _latencies(folder: Path, splits: dict[str, Splits], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per sample, by domain, of the small model and of the adapter unmerged and merged."""
    unmerged, merged = (_HeadClient(folder, policy) for policy in ("unmerged_only", "merged_only"))
    found = {}
    for name, own in splits.items():
        small = SmallModel(folder / f"{name}.onnx", own, threads=1)
        calls: dict[str, Callable[[], object]] = {}
        for kind, answer in (
            ("small model", small.answer),
            ("adapter unmerged", lambda sample, name=name: unmerged.answer(name, sample)),
            ("adapter merged", lambda sample, name=name: merged.answer(name, sample)),
        ):
            samples = itertools.cycle(own.test[:rounds])
            calls[kind] = lambda answer=answer, samples=samples: answer(next(samples))  # type: ignore[misc]
        seconds = interleaved(calls, rounds, warmup=3)
        found[name] = {kind: median_ms(each) for kind, each in seconds.items()}
    return found


class _HeadClient:
    """The embedded model with all domains' adapters, without caches, one request at a time."""

    def __init__(self, folder: Path, policy: str) -> None:
        path = checkpoint_path()
        self._processor = InputProcessor.from_pretrained(path)
        self._local = LocalEngine(
            EngineConfig(
                model=path, dtype="float32", policy=policy, prefix_cache=False, vision_cache_bytes=0, threads=1
            )
        )
        for name in DOMAINS:
            self._local.engine.load_adapter(name, str(folder / name))
        self._numbers = itertools.count()

    def answer(self, name: str, sample: Sample) -> None:
        prompt = self._processor.chat(DOMAINS[name][1], len(sample.frames))
        encoded = self._processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_ids=encoded.prompt_ids,
            vision=encoded.vision,
            adapter=name,
            head=name,
            sampling=SamplingParams(max_tokens=1),
        )
        (outputs,) = self._local.run([request]).values()
        last = outputs[-1]
        assert last.error is None and last.head is not None, f"a request of the bench failed: {last.error}"
        assert not any(output.token_ids for output in outputs), "a head answers without generated tokens"


# -- switching --------------------------------------------------------------------------------------------------------


def _switching(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds until another model or adapter can answer: to load a small model from its file, to load an adapter
    from its folder, to merge a loaded one in place of another, and to restore the base weights."""
    embedded = load_model(EngineConfig(model=checkpoint_path(), dtype="float32"))
    models = {
        f"adapter, embedded model, rank {LoraPlan().rank}": MergeableModel(
            embedded.config, _CPU, _ARENA_BYTES, model=embedded
        ),
        f"adapter, model of 0.5 billion weights, rank {_RANK}": MergeableModel(
            half_billion_config(vision="none"), _CPU, _ARENA_BYTES
        ),
    }
    calls: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        files = {f"small model, {name}": folder / f"{name}.onnx" for name in DOMAINS}
        large = _large_model(Path(temporary) / "large.onnx")
        files[f"small model, random weights, {large.stat().st_size / 1e6:.0f} MB"] = large
        for title, file in files.items():
            calls[f"{title}: load"] = lambda file=file: open_session(file, threads=1)  # type: ignore[misc]
        for (title, model), folders in zip(models.items(), ([folder / name for name in DOMAINS], None), strict=True):
            if folders is None:
                folders = [
                    Path(
                        write_adapter(Path(temporary) / f"{n}", model.shapes, _RANK, seed=n, dtype=model.hf_model.dtype)
                    )
                    for n in range(3)
                ]
            *merged, last = folders
            keys = itertools.cycle([model.load_folder(str(each)) for each in merged])
            switcher = ShadowSwitcher(model.slabs, model.pool)
            calls[f"{title}: load"] = lambda model=model, last=last: _load_again(model, last)  # type: ignore[misc]
            calls[f"{title}: merge"] = lambda switcher=switcher, keys=keys: switcher.switch(next(keys))  # type: ignore[misc]
            calls[f"{title}: back"] = lambda switcher=switcher: switcher.switch(None)  # type: ignore[misc]
        calls = {title: torch.no_grad()(call) for title, call in calls.items()}
        seconds = interleaved(calls, rounds, warmup=2)
    return [{"what": what, "median ms": median_ms(each), "max ms": 1e3 * max(each)} for what, each in seconds.items()]


def _load_again(model: MergeableModel, folder: Path) -> None:
    key = model.load_folder(str(folder))
    model.pool.evict(key)


def _large_model(file: Path) -> Path:
    """Convolutions with random weights and about as many parameters as YOLOv8n to YOLOv8s (3 and 11 million)."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise((3, *_LARGE_WIDTHS)):
        layers += [nn.Conv2d(wide, narrow, 3, 2, 1), nn.ReLU()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends the exporter that needs onnxscript
        torch.onnx.export(nn.Sequential(*layers).eval(), (torch.zeros(1, 3, 640, 640),), file, dynamo=False)
    return file


BENCH = Bench(
    name="teachers",
    cases=cases,
    measure=measure,
    combine=combine,
    same=(),
    parts=True,
    plots=(
        Plot(file="ranking", kind="bars", x="domain", y=METHODS, ylabel="score on test data"),
        Plot(
            file="latency",
            kind="bars",
            x="domain",
            y=("small model ms", "adapter unmerged ms", "adapter merged ms"),
            log="y",
            ylabel="ms of processor time per answer, one thread",
        ),
    ),
)
