"""The content of requests' adapters: an answer continues with the content that it began with, or not at all."""

from __future__ import annotations

import dataclasses

from vlora.engine.compositions import Compositions
from vlora.errors import AdapterChanged, BadRequest
from vlora.lora.registry import AdapterRegistry, Registration
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import ErrorValue, Request, RequestOutput


def check_version(request: Request, registration: Registration | None, *, is_active: bool = True) -> bool:
    """Check `Request.adapter_version`.

    Args:
        is_active: Whether the adapter applies to any of its tokens.

    Returns:
        Whether the content is right, or any is. False if the adapter was not read yet.

    Raises:
        AdapterChanged: The adapter has other content.
        BadRequest: The request has no adapter.
    """
    wanted = request.adapter_version
    if wanted is None:
        return True
    if registration is None:
        raise BadRequest(
            f"adapter_version is {wanted!r}, but the request has no adapter; set adapter, or omit adapter_version",
            field="adapter_version",
        )
    if is_active and registration.adapter is None:
        return False
    if is_active and registration.content.version == wanted:
        return True
    # The version of an adapter that is off is never returned (`AdapterVersions.version_of`).
    found = f"content {registration.content.version!r}" if is_active else "other invocation tokens"
    raise AdapterChanged(
        f"adapter {registration.name!r} has {found}, but the answer so far was computed with content {wanted!r}; send "
        "the request again without answered and adapter_version"
    )


@dataclasses.dataclass(eq=False)
class AdapterVersions:
    """Hooks that hold requests with an `adapter_version` until their adapter is read, and check its content then."""

    adapters: Compositions
    registry: AdapterRegistry
    scheduler: Scheduler

    def __post_init__(self) -> None:
        self._registrations: dict[str, Registration] = {}  # by request id, of active self.adapters
        self._unread: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        if request.adapter is None:
            return
        registration = self.adapters.get(request.adapter, request.adapter_version)
        if registration.header.first_token(request.prompt_ids) is None:
            return  # the adapter is off
        self._registrations[request.request_id] = registration
        if request.adapter_version is not None and registration.adapter is None:
            self._unread[request.request_id] = request

    def version_of(self, request_id: str) -> str | None:
        """The content hash of an unfinished request's adapter; None if it is off, not read yet, or there is none."""
        registration = self._registrations.get(request_id)
        return None if registration is None or registration.adapter is None else registration.adapter.version

    def release_read(self) -> list[RequestOutput]:
        """Release requests with an adapter that was read; return the last outputs of those with a changed adapter."""
        outputs: list[RequestOutput] = []
        for request_id, request in tuple(self._unread.items()):
            registration = self._registrations[request_id]
            self.registry.fetch(registration.key)  # starts the read, or collects its result
            try:
                if not check_version(request, registration):
                    continue
            except AdapterChanged as error:
                output = self.scheduler.fail(request_id, ErrorValue.of(error))
                outputs += [] if output is None else [output]
            else:
                self.scheduler.release(request_id)
            del self._unread[request_id]
        return outputs

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._registrations.pop(request_id, None)
        self._unread.pop(request_id, None)
