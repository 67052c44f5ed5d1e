"""Small models beside the adapters that replace them: accuracy, latency, and the cost of changing from one to another.

V-LoRA section 3.1 (an adapter is swapped in 15 ms, YOLO in 110 ms, OSCAR in 520 ms, on a GPU) and figure 15. Both are
trained on the same samples of four domains. A small model runs in onnxruntime; an adapter answers with its head, in
one pass of the embedded model. All times are processor time of one thread, from decoded pictures to the answer.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from fusion.bench.result_store import origins
from fusion.bench.rivals import DOMAINS, METHODS, SMALL, splits_of, train_rivals
from fusion.data.samples import Sample, Splits
from fusion.embedded import checkpoint_path
from fusion.plan.schema import LoraPlan
from fusion.rivals import SmallModel
from fusion.teachers.onnx_detector import open_session
from vlora.bench.dummy import half_billion_config, write_adapter
from vlora.bench.engine.merge import MergeableModel
from vlora.bench.report import Report, environment
from vlora.bench.timing import interleaved, median_ms
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadConfig
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.types import Request, SamplingParams

GOES_ON = True

_SEEDS = (0, 1)
_CPU = torch.device("cpu")
_ARENA_BYTES = 2**28  # several adapters of the larger model
_RANK = 16  # of the adapters on the larger model
_LARGE_WIDTHS = (64, 128, 256, 512, 1024)  # 6 million weights as float32, 25 MB: between YOLOv8n and YOLOv8s


def run(quick: bool, partial: Path | None = None) -> Report:
    """Train and score for two seeds; measure latencies and switching with the models of the first.

    Args:
        quick: One seed, few samples and steps: scores mean nothing.
        partial: Folder for trained models, from which a stopped run continues.

    Raises:
        BadConfig: onnxruntime is not installed.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise BadConfig("`vlora bench teachers` needs onnxruntime; pip install 'vlora[bench]'") from error
    if partial is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run(quick, Path(temporary))
    torch.set_num_threads(1)
    here, seeds = environment(), _SEEDS[:1] if quick else _SEEDS
    trained = [train_rivals(seed, quick, partial, _say, here) for seed in seeds]
    store = trained[0].store
    times = store.once("times", lambda: measure_times(store.folder, quick), here=True)
    found = [one.found for one in trained]
    rows = [_row(name, found, times["latencies"][name]) for name in DOMAINS]
    results = {f"{method}, seed {one.found['seed']}": one.results[method] for one in trained for method in METHODS}
    return Report(
        "teachers", rows, [], found={"switching": times["switching"], "runs": found, "origins": origins(results)}
    )


def measure_times(folder: Path, quick: bool) -> dict[str, Any]:
    """Latencies and the cost of switching, with the models of one seed."""
    torch.set_num_threads(1)
    return {
        "latencies": _latencies(folder, splits_of(0, quick), 5 if quick else 40),
        "switching": _switching(folder, 3 if quick else 15),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr)


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


# -- pictures ---------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write ranking.png: scores as in figure 15, and latencies. Bars: one standard error."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [row["domain"] for row in rows]
    figure, (scores, times) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2))
    for place, method in enumerate(METHODS):
        at = [number + 0.27 * (place - 1) for number in range(len(names))]
        values = [row[method] for row in rows]
        errors = [row[f"{method} +-"] for row in rows]
        scores.bar(at, values, 0.25, yerr=errors, capsize=3, label=method)
        for x, value, error in zip(at, values, errors, strict=True):
            scores.text(x, value + error + 0.02, f"{value:.2f}", ha="center", fontsize=7)
    scores.set_xticks(range(len(names)), [f"{row['domain']}\n({row['metric']})" for row in rows])
    scores.set(ylabel="score on test data", ylim=(0, 1.3))
    scores.legend(fontsize=8, ncols=2, loc="upper center")
    kinds = [key.removesuffix(" ms") for key in rows[0] if key.endswith(" ms")]
    for place, kind in enumerate(kinds):
        at = [number + 0.27 * (place - 1) for number in range(len(names))]
        values = [row[f"{kind} ms"] for row in rows]
        times.bar(at, values, 0.25, label=kind)
        for x, value in zip(at, values, strict=True):
            times.text(x, value * 1.1, f"{value:.2g}", ha="center", fontsize=7)
    times.set_xticks(range(len(names)), names)
    times.set(ylabel="ms of processor time per answer, one thread", yscale="log")
    times.margins(y=0.4)
    times.legend(fontsize=8, loc="upper left")
    for panel in (scores, times):
        panel.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(folder / "ranking.png", dpi=110)
    pyplot.close(figure)
