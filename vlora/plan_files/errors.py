"""Errors in a plan and its data, collected and reported together: file, line, field, and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from vlora.errors import BadPlan

MAX_LISTED = 20

Location = tuple[int | str, ...]
"""A place in a plan: ("domains", 0, "threshold")."""


@dataclasses.dataclass(frozen=True)
class PlanText:
    """A plan file's text: its name and the line of each field. file: None for a plan built in code."""

    file: Path | None = None
    tree: yaml.Node | None = None

    def place(self, location: Location) -> str:
        """Format a location: "plan.yaml, line 7, field `domains[0].threshold`"."""
        field = _field(location)
        return f"field `{field}`" if self.file is None else f"{self.file}, line {self._line(location)}, field `{field}`"

    def _line(self, location: Location) -> int:
        """The line of the deepest part of `location` that exists in the file."""
        node = self.tree
        line = 1 if node is None else node.start_mark.line + 1
        for step in location:
            found = _child(node, step)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line


class PlanErrors:
    """Errors in the order in which they were found. The first 20 are listed, the rest are counted.

    len() is the number of errors in this part of the plan, its sub-parts included. notes: what a reader of this part
    did that its author may not expect; no errors.
    """

    def __init__(self, text: PlanText) -> None:
        self._text = text
        self._here: Location = ()
        self._whole = False
        self._parent: PlanErrors | None = None
        self._listed: list[str] = []
        self._count = 0
        self.notes: list[str] = []

    def __len__(self) -> int:
        return self._count

    def inside(self, *steps: int | str, whole: bool = False) -> PlanErrors:
        """A sub-part of the plan; its errors also count here. whole: the part has no own fields in the file."""
        part = PlanErrors(self._text)
        part._here, part._whole, part._parent = (*self._here, *steps), whole, self
        return part

    def add(self, message: str, *steps: int | str) -> None:
        location = self._here if self._whole else (*self._here, *steps)
        self._record(f"{self._text.place(location)}: {message}")

    def note(self, message: str) -> None:
        """Add something that is no error. Its repetition is dropped."""
        if message not in self.notes:
            self.notes.append(message)

    def raise_if_any(self) -> None:
        """Raise BadPlan with one error per line, if there are any."""
        if not self._count:
            return
        more = self._count - len(self._listed)
        raise BadPlan("\n".join(self._listed) + (f"\nand {more} more" if more else ""))

    def _record(self, message: str) -> None:
        self._count += 1
        if self._count <= MAX_LISTED:
            self._listed.append(message)
        if self._parent is not None:
            self._parent._record(message)  # noqa: SLF001  (of this class)


def _child(node: yaml.Node | None, step: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key node and the value node of an entry of a mapping or list."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None


def _field(location: Location) -> str:
    out = ""
    for step in location:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out or "plan"
