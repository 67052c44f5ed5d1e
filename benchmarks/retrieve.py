"""`vlora bench retrieve`: recall of `vlora retrieve` by each of its signals and by all, with an adapter that is trained
here, on held-back videos and pictures with queries about them.

The adapter answers "is there DESCRIPTION?" about rendered streets and captions them in words; its heads read digits and
signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.adapters import base_of, cut, plan_of, trainer_of
from benchmarks.recall import Query, goals_of, measure_recall
from benchmarks.searched_videos import (
    PASSING_CAPTION,
    QUESTION,
    STREET_CAPTION,
    ask_passing,
    ask_street,
    caption_passing,
    caption_street,
    render_passing,
    render_streets,
    write_pictures,
)
from fusion.data.samples import Sample, Splits
from fusion.plan.schema import LoraPlan
from fusion.synthetic.sources import load_source
from vlora.bench.harness import Bench, Measured, Results, Store, say
from vlora.bench.serve.server_process import launched_server
from vlora.client import Client

ADAPTER = "streets"

_DRAWN: dict[str, tuple[str, str, Callable[[np.random.Generator], Sample]]] = {
    "street-questions": ("vqa", QUESTION, ask_street),
    "street-captions": ("captioning", STREET_CAPTION, caption_street),
    "passing-questions": ("vqa", QUESTION, ask_passing),
    "passing-captions": ("captioning", PASSING_CAPTION, caption_passing),
}
"""Domain -> task, question, and the function that draws a sample."""
_READ = {"digits": ("sklearn-digits", "what digit is shown ?"), "signs": ("drawn-signs", "what sign is shown ?")}
"""Domain of a head -> source and question."""


class Collection(NamedTuple):
    """Files of a folder that are searched together. num_frames: of the clip that the model reads. base_caption,
    caption: the questions that are asked of each clip for the index, of the base model and of the adapter. heads: of
    the adapter, asked as well. queries: by the name of their group.
    """

    folder: str
    num_frames: int
    base_caption: str
    caption: str
    heads: list[str]
    queries: dict[str, list[Query]]


class Prepared(NamedTuple):
    """adapters: the folder that contains the adapter. scores: of it, on test samples."""

    adapters: str
    collections: list[Collection]
    scores: dict[str, float]
    training_cpu_s: float


def prepare(quick: bool, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Train one adapter on all domains at once, and render the collections; a `Prepared` as JSON."""
    sizes, steps = ((60, 20, 20), 2) if quick else ((3000, 20, 200), 200)
    questions = {name: ("made", question) for name, (_, question, _) in _DRAWN.items()} | _READ
    plan = plan_of(questions, seed, steps, 32, lora=LoraPlan(rank=16, alpha=32))
    trainer = trainer_of(plan, base_of(), {name: _splits(name, seed, sizes) for name in questions})
    trainer.adapter.reset()
    began = time.process_time()
    trainer.train_together(tuple(questions))
    seconds = time.process_time() - began
    scores = {name: trainer.evaluator.score(name, domain.test) for name, domain in trainer.domains.items()}
    adapters = folder / f"adapters-{seed}"
    trainer.save(adapters / ADAPTER, trainer.adapter.snapshot())
    say(f"trained in {seconds:.0f} s of processor time: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()))
    num_videos, num_pictures = (2, 8) if quick else (12, 60)
    streets, passing, pictures = (folder / f"{name}-{seed}" for name in ("streets", "passing", "pictures"))
    digits, signs = (load_source(source, seed) for source, _ in _READ.values())
    image, video = "describe the image.", "describe the video."
    collections = [
        Collection(str(streets), 1, image, STREET_CAPTION, [], render_streets(streets, seed, num_videos)),
        Collection(str(passing), 4, video, PASSING_CAPTION, [], render_passing(passing, seed, num_videos)),
        Collection(str(pictures), 1, image, image, [*_READ], write_pictures(pictures, digits, signs, num_pictures)),
    ]
    made = Prepared(str(adapters), collections, scores, seconds)
    return dict(msgspec.to_builtins(made._asdict()))


def _splits(name: str, seed: int, sizes: tuple[int, int, int]) -> Splits:
    if name in _READ:
        return cut(load_source(_READ[name][0], seed), *sizes)
    task, _, draw = _DRAWN[name]
    rng = np.random.default_rng([seed, *name.encode()])
    train, validation, test = ([draw(rng) for _ in range(count)] for count in sizes)
    return Splits(task, (), train, validation, test, real=False)


_PREPARED, _RECALL = "prepared-0", "recall"


def cases(quick: bool) -> dict[str, tuple[str, bool]]:
    """Quick: few samples, steps and videos: scores mean nothing. The job of the first case gives its memory back before
    a server starts.
    """
    return {name: (name, quick) for name in (_PREPARED, _RECALL)}


def measure(case: tuple[str, bool], store: Store) -> Measured:
    name, quick = case
    if name == _PREPARED:
        return Measured([], {"prepared": prepare(quick, store.folder)})
    stored = store.read(_PREPARED)
    assert stored is not None
    made = stored["found"]["prepared"]
    prepared = Prepared(**{**made, "collections": msgspec.convert(made["collections"], list[Collection])})
    rows: list[dict[str, Any]] = []
    ports = ("--rpyc-port", "0", "--http-port", "0")
    with (
        launched_server("vlora.cli", "serve", "--adapters", prepared.adapters, "--threads", "1", *ports) as server,
        Client(port=server.rpyc_port) as client,
    ):
        for collection in prepared.collections:
            rows += measure_recall(
                client,
                Path(collection.folder),
                store.folder,
                collection.queries,
                adapter=ADAPTER,
                heads=collection.heads,
                num_frames=collection.num_frames,
                base_caption=collection.base_caption,
                caption=collection.caption,
                question=QUESTION,
                say=say,
                sheet=store.folder / f"{Path(collection.folder).name}.png",
            )
    trained = {"test scores": prepared.scores, "training CPU s": prepared.training_cpu_s}
    return Measured(rows, {"adapter": trained}, [] if quick else goals_of(rows))


def combine(results: Results) -> Measured:
    return results[_RECALL]


BENCH = Bench(
    name="retrieve",
    cases=cases,
    measure=measure,
    combine=combine,
    same=(),
    parts=True,
    jobs=True,
    alone=lambda case: case[0] == _RECALL,
)
