"""Our own mistakes, on their way to a caller: logged here, told as a typed error."""

from __future__ import annotations

import logging

from vlora.errors import VLoraError

log = logging.getLogger(__name__)


def typed(error: Exception) -> VLoraError:
    """What goes over the wire. Any other error is our own mistake: it is logged, and its call fails alone."""
    if isinstance(error, VLoraError):
        return error
    log.error("a call failed", exc_info=error)
    return VLoraError(f"the server made a mistake: {type(error).__name__}: {error}")
