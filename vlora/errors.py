"""The hierarchy of errors that V-LoRA raises.

::

    VLoraError
    |-- BadConfig            a setting, flag or model that is invalid
    |   `-- UnsupportedModel     a model family that is not on the allow-list, with the reason
    |-- BadPlan              a plan that cannot be run (file, line and field named)
    |-- BadAdapter           an adapter that cannot be served, with the reason
    |   `-- AdapterChanged       the adapter has other content than the answer so far was computed with
    |-- BadRequest           the request is invalid
    |   |-- BadImage             bytes that are not an image or a video, or a frame that cannot be decoded
    |   |-- TooLarge             an image, a video or a body over the server's limits
    |   |-- PromptTooLong        prompt and answer do not fit the model's context
    |   |-- UnknownAdapter       no adapter of that name is registered
    |   |-- UnknownHead          the adapter has no head of that name
    |   |-- UnknownReplica       no replica has that name, or the server has one engine
    |   |-- UnknownFile          the caller has no file or batch with that id; it may be deleted or expired
    |   `-- UnknownStream        the caller has no open stream with that id; it may be closed or expired
    |-- Unauthorized         the token is missing, wrong or expired
    |-- Forbidden            the token is valid, but does not permit this call
    |-- OverCapacity         the server is full; try again later
    |-- DeadlineMissed       the answer was not ready within the request's latency bound
    |   `-- DeadlineUnreachable  the bound cannot be met: rejected before anything is computed
    |-- Aborted              the request was cancelled by its client or by an operator
    |-- StepFailed           a batch failed inside the engine; only its own requests fail
    |-- EngineDead           the engine process has died; the message contains the cause
    `-- Disconnected         the server cannot be reached, or the connection broke before the answer

Each class has a stable `code`, which is sent over the wire, and an `http_status`. `assert` is for internal errors only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

_NAMES_SHOWN = 20


class VLoraError(Exception):
    """Base class of all V-LoRA errors. `str(error)` states the problem, the value, and the remedy."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500


class BadConfig(VLoraError):
    code = "bad_config"


class UnsupportedModel(BadConfig):
    code = "unsupported_model"


class BadPlan(VLoraError):
    code = "bad_plan"
    http_status = 400


class BadAdapter(VLoraError):
    code = "bad_adapter"
    http_status = 400


class AdapterChanged(BadAdapter):
    code = "adapter_changed"
    http_status = 409


class BadRequest(VLoraError):
    """An invalid request. field: its invalid field, if there is one; not sent between processes."""

    code = "bad_request"
    http_status = 400

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadImage(BadRequest):
    code = "bad_image"


class TooLarge(BadRequest):
    code = "too_large"
    http_status = 413


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class UnknownAdapter(BadRequest):
    code = "unknown_adapter"
    http_status = 404


class UnknownHead(BadRequest):
    code = "unknown_head"
    http_status = 404


class UnknownReplica(BadRequest):
    code = "unknown_replica"
    http_status = 404


class UnknownFile(BadRequest):
    code = "unknown_file"
    http_status = 404


class UnknownStream(BadRequest):
    code = "unknown_stream"
    http_status = 404


class Unauthorized(VLoraError):
    code = "unauthorized"
    http_status = 401


class Forbidden(VLoraError):
    code = "forbidden"
    http_status = 403


class OverCapacity(VLoraError):
    code = "over_capacity"
    http_status = 429


class DeadlineMissed(VLoraError):
    code = "deadline_missed"
    http_status = 504


class DeadlineUnreachable(DeadlineMissed):
    code = "deadline_unreachable"
    http_status = 503


class Aborted(VLoraError):
    code = "aborted"
    http_status = 499


class StepFailed(VLoraError):
    code = "step_failed"


class EngineDead(VLoraError):
    code = "engine_dead"
    http_status = 503


class Disconnected(VLoraError):
    code = "disconnected"
    http_status = 503


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
