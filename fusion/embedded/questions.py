"""Questions about scenes of the rendered world, with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fusion.embedded.drawing import COLORS, MOVES, NUMBERS, SHAPES, THINGS, article, chance, pick, plural


class Question(NamedTuple):
    """skill: the skill that the question tests; accuracy is reported per skill.

    The other fields are used only in training. about: the words of the text that name an object. holds: whether it
    exists, None if the question presupposes it. meant: attributes (see ATTRIBUTES) of all objects that the words name;
    None in clips, where objects have no fixed position.
    """

    skill: str
    text: str
    answer: str
    about: str = ""
    holds: bool | None = None
    meant: frozenset[str] | None = None


# Forms of each question; the first form is used half of the time.
_FORMS: dict[str, tuple[str, ...]] = {
    "count all": ("how many objects are there?", "how many things do you see?", "count the objects."),
    "count": ("how many {} are there?", "how many {} do you see?", "count the {}."),
    "at": ("what is at the {}?", "what do you see at the {}?"),
    "color at": ("what color is the object at the {}?", "what is the color of the object at the {}?"),
    "kind at": ("what kind of object is at the {}?", "what type of object is at the {}?"),
    "color": ("what color is the {}?", "what is the color of the {}?"),
    "where": ("where is the {}?", "where do you see the {}?", "at what position is the {}?"),
    "kind": ("what is the {} object?", "what kind of object is the {} one?"),
    "present": ("is there {}?", "do you see {}?", "is {} in the image?"),
    "describe": ("describe the image.", "what is in the image?", "what does the image show?"),
    "light": ("is it day or night?", "day or night?"),
    "digit": ("what digit is shown?", "what number is this?", "what digit do you see?"),
    "pattern": ("what pattern is shown?", "what pattern is this?"),
    "brightness": ("is the image bright or dark?", "is this picture bright or dark?"),
    "sign shape": ("what shape is the sign?", "what is the shape of the sign?"),
    "sign content": ("what is on the sign?", "what does the sign show?"),
    "move of": ("which way does the {} move?", "where does the {} go?", "which way is the {} moving?"),
    "move": ("which way does it move?", "what is the direction of motion?"),
    "describe clip": ("describe the video.", "what happens in the video?"),
    "moving": ("what is moving?", "what moves?"),
}


def make_question(rng: np.random.Generator, form: str, skill: str, answer: str, name: str = "") -> Question:
    """Draw a form of a question. name: the object in it."""
    forms = _FORMS[form]
    text = forms[0] if chance(rng, 0.5) else pick(rng, forms)
    return Question(skill, text.format(name), answer)


class Placed(NamedTuple):
    kind: str
    color: str
    position: str

    @property
    def words(self) -> str:
        return f"{self.color} {self.kind}"


def ask_things(rng: np.random.Generator, placed: list[Placed], night: bool | None) -> list[Question]:
    one = placed[int(rng.integers(len(placed)))]
    kinds = [item.kind for item in placed]
    colors = [item.color for item in placed]
    questions = [make_question(rng, "count all", "count", NUMBERS[len(placed)])]
    for form, skill, answer in (
        ("at", "scene", article(one.words)),
        ("color at", "color", one.color),
        ("kind at", _kind_skill(one.kind), article(one.kind)),
    ):
        questions.append(_naming(make_question(rng, form, skill, answer, one.position), one.position, placed))
    for kind in (one.kind, pick(rng, THINGS)):
        question = make_question(rng, "count", "count", NUMBERS[kinds.count(kind)], plural(kind))
        questions.append(_naming(question, kind, placed, open_=True)._replace(about=plural(kind)))
    if kinds.count(one.kind) == 1:
        questions.append(_naming(make_question(rng, "color", "color", one.color, one.kind), one.kind, placed))
    if colors.count(one.color) == 1:
        question = make_question(rng, "kind", _kind_skill(one.kind), article(one.kind), one.color)
        questions.append(_naming(question, one.color, placed))
    questions += _ask_presence(rng, placed)
    questions += _ask_where(rng, placed)
    if len(placed) <= 2:
        questions.append(
            make_question(rng, "describe", "describe", " and ".join(article(item.words) for item in placed))
        )
    if night is not None:
        questions.append(make_question(rng, "light", "scene", "night" if night else "day"))
    return questions


def _kind_skill(kind: str) -> str:
    return "shape" if kind in SHAPES else "kind"


def _names(item: Placed) -> tuple[str, str, str]:
    return item.kind, item.color, item.words


def _naming(question: Question, name: str, placed: Sequence[Placed], *, open_: bool = False) -> Question:
    """The question with the meaning of its name. open_: the question does not presuppose that the object exists."""
    meant = [item for item in placed if name in (*_names(item), item.position)]
    attributes = frozenset(attribute for item in meant for attribute in item)
    return question._replace(about=name, holds=bool(meant) if open_ else None, meant=attributes)


def _spoken(name: str) -> str:
    return f"{name} object" if name in COLORS else name


def _absent(rng: np.random.Generator, placed: list[Placed], way: int) -> str:
    """A name that matches no object: a kind (0), a colour (1), or both (2), one of which is present."""
    there = {_names(item)[way] for item in placed}
    while True:
        one, kind, color = placed[int(rng.integers(len(placed)))], pick(rng, THINGS), pick(rng, tuple(COLORS))
        both = f"{one.color} {kind}" if chance(rng, 0.5) else f"{color} {one.kind}"
        name = (kind, color, both)[way]
        if name not in there:
            return name


def _ask_presence(rng: np.random.Generator, placed: list[Placed]) -> list[Question]:
    """Questions whether a kind, a colour or both exist: two of each, and the answer is yes in half of the cases."""
    questions = []
    for way in range(3):
        for _ in range(2):
            holds = chance(rng, 0.5)
            name = pick(rng, [_names(item)[way] for item in placed]) if holds else _absent(rng, placed, way)
            question = make_question(rng, "present", "yes or no", _yes_no(holds), article(_spoken(name)))
            questions.append(_naming(question, name, placed, open_=True))
    return questions


def _ask_where(rng: np.random.Generator, placed: list[Placed]) -> list[Question]:
    """Questions for the position of a named object; sometimes no object matches."""
    questions = []
    for way in range(3):
        names = [_names(item)[way] for item in placed]
        single = [item for item in placed if names.count(_names(item)[way]) == 1]
        if chance(rng, 0.25):
            name, answer = _absent(rng, placed, way), "nowhere"
        elif single:
            item = single[int(rng.integers(len(single)))]
            name, answer = _names(item)[way], item.position
        else:
            continue
        question = make_question(rng, "where", "position", answer, _spoken(name))
        questions.append(_naming(question, name, placed, open_=True))
    return questions


def ask_clip(rng: np.random.Generator, kind: str, color: str, move: str, standing: Placed | None) -> list[Question]:
    words = f"{color} {kind}"
    questions = []
    if standing is None or standing.kind != kind:
        questions.append(make_question(rng, "move of", "motion", move, kind))
        for _ in range(2):
            holds = chance(rng, 0.5)
            guess = move if holds else pick(rng, [other for other in MOVES if other != move])
            does = f"does the {kind} stand still?" if guess == "still" else f"does the {kind} move {guess}?"
            questions.append(Question("motion yes or no", does, _yes_no(holds), guess, holds))
    if standing is None:
        questions.append(make_question(rng, "move", "motion", move))
        motion = "stands still" if move == "still" else f"moves {move}"
        questions.append(make_question(rng, "describe clip", "describe", f"{article(words)} {motion}"))
    questions.append(make_question(rng, "moving", "moving", "nothing" if move == "still" else article(words)))
    return questions


def _yes_no(holds: bool) -> str:
    return "yes" if holds else "no"
