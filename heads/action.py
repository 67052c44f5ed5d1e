"""Action recognition over several frames. The last prompt token attends to all frames in order, so the head reads a
clip like a single image."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from heads.classification import Classification


@dataclasses.dataclass(frozen=True)
class Action(Classification):
    kind: ClassVar[str] = "action"
