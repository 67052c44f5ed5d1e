"""A step between its launch and the moment when its results are known."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vlora.types import Encoded, ErrorValue, HeadAnswer

if TYPE_CHECKING:
    from vlora.models.token_choice import TokenChoice


@dataclasses.dataclass
class LaunchedStep:
    """A step that was launched and not yet collected; on a CPU it is complete.

    start, ready, encoded_by, end: marks of the clock before the switch, after it, after the encoding of images, and
    after the step.
    """

    switched: bool
    in_place: bool
    encoded: Encoded | None
    errors: dict[str, ErrorValue]
    start: Any
    ready: Any
    encoded_by: Any
    end: Any = None
    choice: TokenChoice | None = None
    heads: dict[str, HeadAnswer] = dataclasses.field(default_factory=dict)
