"""`vlora bench retrieve`: recall of `vlora retrieve` by each of its signals and by all, with an adapter that is trained
here, on held-back videos and pictures with queries about all that they show.

`streets`: every second is another still street with one to five objects. `passing`: every second is a clip of one
object that drives, waits or crosses. `pictures`: scanned digits and drawn signs.

The adapter answers "is there DESCRIPTION?" about rendered streets and captions them in words; its heads read digits and
signs.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import msgspec
import numpy as np

from benchmarks.adapters import base_of, cut, plan_of, trainer_of
from benchmarks.recall import BASE, Collection, Query, goals_of, measure_copies, measure_recall
from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import COLORS, SIZE, add_noise, article, chance, pick
from fusion.plan.schema import LoraPlan
from fusion.synthetic.drawn import ACTIONS, CLIP_FRAMES, KINDS, SIDES, Passing, Street, Thing, draw_passing, draw_street
from fusion.synthetic.sources import load_source
from vlora.bench.harness import Bench, Measured, Results, Store, say
from vlora.bench.serve.server_process import served
from vlora.client import Client

QUESTION = "is there {}?"
"""The question that ranks the seconds, by the probability of "yes"."""
STREET_CAPTION, PASSING_CAPTION = "what is on the road?", "what happens on the road?"
SECONDS, FPS = 8, 8

_WHERE = {"left": "on the left", "middle": "in the middle", "right": "on the right"}
_DOES = {"drives left": "driving left", "drives right": "driving right", "waits": "that waits", "crossing": "crossing"}
_MOST_THINGS = 5


class Described(NamedTuple):
    """One second. frames: RGB, at FPS. texts: descriptions that are true of it. objects: simpler ones, such as "a red
    bus", that may be true of many.
    """

    frames: list[np.ndarray]
    texts: frozenset[str]
    objects: frozenset[str] = frozenset()


def describe_street(street: Street) -> tuple[list[str], str]:
    """Each object with its side, and the caption that names all of them."""
    things = [_words_of(thing) for thing in street.things]
    return things, " and ".join(things)


def _words_of(thing: Thing) -> str:
    return f"{article(f'{thing.color} {thing.kind}')} {_WHERE[SIDES[thing.side]]}"


def describe_passing(passing: Passing) -> str:
    return f"{article(f'{passing.color} {passing.kind}')} {_DOES[passing.action]}"


# -- training samples --------------------------------------------------------------------------------------------------


def ask_street(rng: np.random.Generator) -> Sample:
    """Whether a street shows one or two objects at their sides; in a wrong description, kind, colour or side of one
    differ.
    """
    street = draw_street(rng, _MOST_THINGS)
    number = min(len(street.things), 1 + chance(rng, 0.5))
    chosen = [street.things[place] for place in sorted(rng.permutation(len(street.things))[:number])]
    present = {_words_of(thing) for thing in street.things}
    holds = chance(rng, 0.5)
    while not holds and all(_words_of(thing) in present for thing in chosen):
        chosen[int(rng.integers(number))] = _changed(rng, chosen[int(rng.integers(number))])
    return Sample((street.frame,), "yes" if holds else "no", QUESTION.format(" and ".join(map(_words_of, chosen))))


def _changed(rng: np.random.Generator, thing: Thing) -> Thing:
    match int(rng.integers(3)):
        case 0:
            return thing._replace(kind=pick(rng, KINDS))
        case 1:
            return thing._replace(color=pick(rng, tuple(COLORS)))
        case _:
            return thing._replace(side=int(rng.integers(len(SIDES))))


def caption_street(rng: np.random.Generator) -> Sample:
    street = draw_street(rng, _MOST_THINGS)
    return Sample((street.frame,), describe_street(street)[1])


def ask_passing(rng: np.random.Generator) -> Sample:
    """Whether a clip shows an object with an action; the wrong descriptions differ in kind, colour or action."""
    passing = draw_passing(pick(rng, ACTIONS), rng, CLIP_FRAMES)
    holds, true = chance(rng, 0.5), describe_passing(passing)
    text = true
    while not holds and text == true:
        changed = int(rng.integers(3))
        other = passing._replace(
            kind=pick(rng, ("car", "truck", "bus")) if changed == 0 and passing.kind != "person" else passing.kind,
            color=pick(rng, tuple(COLORS)) if changed == 1 else passing.color,
            action=pick(rng, ACTIONS[:3]) if changed == 2 and passing.kind != "person" else passing.action,
        )
        text = describe_passing(other)
    return Sample(tuple(passing.frames), "yes" if holds else "no", QUESTION.format(text))


def caption_passing(rng: np.random.Generator) -> Sample:
    passing = draw_passing(pick(rng, ACTIONS), rng, CLIP_FRAMES)
    return Sample(tuple(passing.frames), describe_passing(passing))


# -- collections -------------------------------------------------------------------------------------------------------


def render_streets(folder: Path, seed: int, num_videos: int) -> dict[str, list[Query]]:
    """Write `num_videos` videos of SECONDS still streets each; return queries for one object or two with their sides,
    which describe one second each, and for all seconds with an object.
    """
    rng = np.random.default_rng([seed, 101])

    def draw() -> Described:
        street = draw_street(rng, _MOST_THINGS)
        things, _ = describe_street(street)
        pairs = {f"{first} and {second}" for first, second in itertools.combinations(things, 2)}
        frames = [add_noise(rng, street.frame.astype(np.int16), 3) for _ in range(FPS)]
        objects = frozenset(article(f"{thing.color} {thing.kind}") for thing in street.things)
        return Described(frames, frozenset({*things, *pairs}), objects)

    videos = [[draw() for _ in range(SECONDS)] for _ in range(num_videos)]
    return {"streets": _render(folder, videos), "streets, one object": _object_queries(videos)}


def render_passing(folder: Path, seed: int, num_videos: int) -> dict[str, list[Query]]:
    """Write `num_videos` videos of SECONDS clips of one action each; return queries for object and action."""
    rng = np.random.default_rng([seed, 202])

    def draw() -> Described:
        passing = draw_passing(pick(rng, ACTIONS), rng, FPS)
        return Described(passing.frames, frozenset({describe_passing(passing)}))

    return {"passing": _render(folder, [[draw() for _ in range(SECONDS)] for _ in range(num_videos)])}


def write_pictures(folder: Path, digits: Splits, signs: Splits, count: int) -> dict[str, list[Query]]:
    """Write `count` test pictures of each; return a query for each label, and for each digit in figures."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[str, int]]] = {}
    for text, splits in (("a digit {}", digits), ("a {} sign", signs)):
        for number, sample in enumerate(splits.test[:count]):
            assert isinstance(sample.target, int)
            name = f"{'digit' if splits is digits else 'sign'}-{number:02}.png"
            cv2.imwrite(str(folder / name), cv2.cvtColor(sample.frames[0], cv2.COLOR_RGB2BGR))
            found.setdefault(text.format(splits.labels[sample.target]), []).append((name, 0))
            if splits is digits:
                found.setdefault(f"the digit {sample.target}", []).append((name, 0))
    return {"pictures": [Query(text, tuple(clips)) for text, clips in sorted(found.items())]}


def _video_name(number: int) -> str:
    return f"street-{number:02}.mp4"


def _render(folder: Path, videos: Sequence[Sequence[Described]]) -> list[Query]:
    """Write the videos (mp4). Raises OSError if OpenCV cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, seconds in enumerate(videos):
        path = folder / _video_name(number)
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (SIZE, SIZE))
        if not writer.isOpened():
            raise OSError(f"OpenCV cannot write {path}")
        for frame in itertools.chain.from_iterable(second.frames for second in seconds):
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
    return list(_unique_queries(videos))


def _unique_queries(videos: Sequence[Sequence[Described]]) -> Iterator[Query]:
    """At most one query for each second: of its descriptions that are true of no other second, the shortest."""
    counts = Counter(text for seconds in videos for second in seconds for text in second.texts)
    for number, seconds in enumerate(videos):
        for place, second in enumerate(seconds):
            own = sorted((text for text in second.texts if counts[text] == 1), key=lambda text: (len(text), text))
            if own:
                yield Query(own[0], ((_video_name(number), place),))


def _object_queries(videos: Sequence[Sequence[Described]]) -> list[Query]:
    found: dict[str, list[tuple[str, int]]] = {}
    for number, seconds in enumerate(videos):
        for place, second in enumerate(seconds):
            for text in second.objects:
                found.setdefault(text, []).append((_video_name(number), place))
    return [Query(text, tuple(clips)) for text, clips in sorted(found.items())]


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
    with (
        served("--adapters", prepared.adapters, "--threads", "1") as server,
        Client(port=server.rpyc_port) as client,
    ):
        for collection in prepared.collections:
            rows += measure_recall(client, collection, store.folder, ADAPTER, QUESTION)
        goals = goals_of(rows)
        for collection in prepared.collections:
            name = Path(collection.folder).name
            rows += measure_copies(client, store.folder / f"{name}-{BASE}.sqlite", name)
    trained = {"test scores": prepared.scores, "training CPU s": prepared.training_cpu_s}
    return Measured(rows, {"adapter": trained}, [] if quick else goals)


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
