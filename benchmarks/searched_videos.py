"""Videos and pictures for retrieval, and queries with all that they describe.

`streets`: every second is another still street with one to five objects. `passing`: every second is a clip of one
object that drives, waits or crosses. `pictures`: scanned digits and drawn signs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from benchmarks.recall import Query
from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import COLORS, SIZE, add_noise, article, chance, pick
from fusion.synthetic.road_signs import ACTIONS, CLIP_FRAMES, Passing, draw_passing
from fusion.synthetic.streets import KINDS, SIDES, Street, Thing, draw_street

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
