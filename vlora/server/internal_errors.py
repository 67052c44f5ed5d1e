"""Internal errors: logged here and returned to the caller as a typed error."""

from __future__ import annotations

import logging

from vlora.errors import VLoraError

log = logging.getLogger(__name__)


def to_vlora_error(error: Exception) -> VLoraError:
    """The error to send. An error of any other type is internal: it is logged, and only its call fails."""
    if isinstance(error, VLoraError):
        return error
    log.error("a call failed", exc_info=error)
    return VLoraError(f"internal server error ({type(error).__name__}: {error}); see the server log")
