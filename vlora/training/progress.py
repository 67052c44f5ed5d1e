"""The progress of a training, as its checkpoint has it beside the adapter."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Literal

from vlora.training.records import Record, Records

Phase = Literal["before", "train", "after", "done"]


@dataclasses.dataclass
class Progress:
    """All numbers of a training that change.

    Attributes:
        phase: Evaluation before the first step, training, evaluation after the last step, or complete.
        place: Records used in the current optimizer step, or in the current evaluation.
        num_passed: Records of the training part that were passed over, because they cannot be used.
        bad, bad_held_out: Places of the records that cannot be used, in both parts.
        reasons: Of the first of them, with file and line.
        num_tokens: Tokens of all micro-steps so far, evaluations included.
        total, count: Sum of losses and number of tokens in the current evaluation.
        held_out_before, held_out_after: Mean losses over the held-out part.
        seconds: Time of the engine's thread.
    """

    phase: Phase = "before"
    step: int = 0
    place: int = 0
    num_passed: int = 0
    bad: list[int] = dataclasses.field(default_factory=list)
    bad_held_out: list[int] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    total: float = 0.0
    count: int = 0
    held_out_before: float | None = None
    held_out_after: float | None = None
    seconds: float = 0.0


class RecordOrder:
    """All records of the training part in a random order, then all in another one, and so on without an end.

    A record's number counts in this order, records that cannot be used included.
    """

    def __init__(self, records: Records, seed: int, bad: Iterable[int], bad_held_out: Iterable[int]) -> None:
        """bad, bad_held_out: places, in both parts, of records that cannot be used."""
        self._train = records.train
        self._seed = seed
        self._bad = set(bad)
        left_out = set(bad_held_out)
        self._held_out = {place: one for place, one in enumerate(records.held_out) if place not in left_out}
        self._orders: dict[int, list[int]] = {}  # of the last two epochs

    @property
    def num_train(self) -> int:
        return len(self._train) - len(self._bad)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def held_out(self, first: int, most: int) -> list[Record]:
        return list(itertools.islice(self._held_out.values(), first, first + most))

    def usable(self, first: int) -> Iterator[int]:
        """Numbers, from `first` on, of the records that can be used."""
        while self.num_train:
            if self._place(first) not in self._bad:
                yield first
            first += 1

    def record(self, number: int) -> Record:
        return self._train[self._place(number)]

    def set_aside(self, number: int) -> int:
        place = self._place(number)
        self._bad.add(place)
        return place

    def set_held_out_aside(self, number: int) -> int:
        place = next(itertools.islice(self._held_out, number, None))
        del self._held_out[place]
        return place

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self._train))
        if epoch not in self._orders:
            order = list(range(len(self._train)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._orders = {epoch: order} | {one: own for one, own in self._orders.items() if abs(one - epoch) == 1}
        return self._orders[epoch][place]
