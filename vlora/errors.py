"""The hierarchy of errors that V-LoRA raises. `assert` is for internal errors only."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

_NAMES_SHOWN = 20


class VLoraError(Exception):
    """Base class of all V-LoRA errors. `str(error)` states the problem, the value, and the remedy.

    code: the class's name in lower case, with underscores; it is sent over the wire. http_status: as its base's, or
    given in the class statement.
    """

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500

    def __init_subclass__(cls, http_status: int | None = None) -> None:
        cls.code = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.http_status = cls.http_status if http_status is None else http_status


class BadConfig(VLoraError):
    """A setting, flag or model that is invalid."""


class UnsupportedModel(BadConfig):
    """A model family that is not on the allow-list, with the reason."""


class BadPlan(VLoraError, http_status=400):
    """A plan that cannot be run (file, line and field named)."""


class BadAdapter(VLoraError, http_status=400):
    """An adapter that cannot be served, with the reason."""


class AdapterChanged(BadAdapter, http_status=409):
    """The adapter has other content than the answer so far was computed with."""


class BadRequest(VLoraError, http_status=400):
    """An invalid request. field: its invalid field, if there is one; not sent between processes."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadImage(BadRequest):
    """Bytes that are not an image or a video, or a frame that cannot be decoded."""


class TooLarge(BadRequest, http_status=413):
    """An image, a video or a body over the server's limits."""


class PromptTooLong(BadRequest):
    """Prompt and answer do not fit the model's context."""


class UnknownAdapter(BadRequest, http_status=404):
    """No adapter of that name is registered."""


class UnknownHead(BadRequest, http_status=404):
    """The adapter has no head of that name."""


class UnknownCamera(BadRequest, http_status=404):
    """The server reads no camera of that name."""


class UnknownReplica(BadRequest, http_status=404):
    """No replica has that name, or the server has one engine."""


class UnknownFile(BadRequest, http_status=404):
    """The caller has no file or batch with that id; it may be deleted or expired."""


class UnknownStream(BadRequest, http_status=404):
    """The caller has no open stream with that id; it may be closed or expired."""


class Unauthorized(VLoraError, http_status=401):
    """The token is missing, wrong or expired."""


class Forbidden(VLoraError, http_status=403):
    """The token is valid, but does not permit this call."""


class OverCapacity(VLoraError, http_status=429):
    """The server is full; try again later. retry_s: after this time; not sent between processes."""

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class RateLimited(OverCapacity):
    """The caller has used a quota of its token."""


class DeadlineMissed(VLoraError, http_status=504):
    """The answer was not ready within the request's latency bound."""


class DeadlineUnreachable(DeadlineMissed, http_status=503):
    """The bound cannot be met: rejected before anything is computed."""


class Aborted(VLoraError, http_status=499):
    """The request was cancelled by its client or by an operator."""


class StepFailed(VLoraError):
    """A batch failed inside the engine; only its own requests fail."""


class EngineDead(VLoraError, http_status=503):
    """The engine process has died; the message contains the cause."""


class Disconnected(VLoraError, http_status=503):
    """The server cannot be reached, or the connection broke before the answer."""


def listed(names: Collection[str]) -> str:
    """Sorted names for a message: the first ones, and the number of the others."""
    shown = sorted(names)[:_NAMES_SHOWN]
    more = len(names) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")


def _tree(cls: type[VLoraError]) -> dict[str, type[VLoraError]]:
    below = (pair for child in cls.__subclasses__() for pair in _tree(child).items())
    return {cls.code: cls, **dict(below)}


def error_codes() -> tuple[str, ...]:
    return tuple(_tree(VLoraError))


def error_from_code(code: str, message: str) -> VLoraError:
    """Rebuild a typed error that was sent as (code, message). An unknown code becomes a plain `VLoraError`."""
    return _tree(VLoraError).get(code, VLoraError)(message)
