"""Fields that not every caller may see, because they name files and addresses of the server."""

from __future__ import annotations

from typing import Any

import msgspec

HIDDEN = "an admin token shows the reason"

WITHOUT_PLACES = msgspec.Meta(extra={"without_places": True})
"""A text that callers without an admin token see without paths and addresses."""


def admin_only(others_see: Any) -> msgspec.Meta:
    """Metadata of a field: callers without an admin token see another value if it is set."""
    return msgspec.Meta(extra={"others_see": others_see})
