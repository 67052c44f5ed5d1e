"""Action recognition: what happens over several frames. The last prompt token has seen them all in their order, so that
a clip is read like a picture."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from heads.classification import Classification


@dataclasses.dataclass(frozen=True)
class Action(Classification):
    kind: ClassVar[str] = "action"
