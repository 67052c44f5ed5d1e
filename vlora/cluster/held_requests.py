"""Requests that wait outside the router's queue: in it the first request holds up all others."""

from __future__ import annotations

from collections.abc import Callable

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.former_contents import parts_of
from vlora.routing import Need, Refusal, Router

CONTENT_S = 5.0
"""How long a request waits for absent replicas that may have the content with which its answer began."""


class HeldRequests:
    """Requests that the router has refused, but that may be served soon.

    While files of its adapter are sent, a request waits within its own bounds. For a content that no connected replica
    has, it waits for `CONTENT_S` while some replicas are absent. Each waits until it is taken or forgotten.
    """

    def __init__(self, router: Router, adapters: ReplicatedAdapters, clock: Callable[[], float]) -> None:
        """clock: in seconds, that of the requests' bounds."""
        self._router = router
        self._adapters = adapters
        self._clock = clock
        self._for_files: dict[str, Need] = {}
        self._for_content: set[str] = set()
        self._lacking_since: dict[str, float] = {}  # also of requests that were taken, until they are forgotten

    def hold(self, refusal: Refusal, *, some_absent: bool) -> bool:
        """Let a request wait if it may be served soon. Returns whether it does."""
        request_id = refusal.need.request_id
        if refusal.reason == "room" and self._awaits_files(refusal.need):
            self._for_files[request_id] = refusal.need
            return True
        if refusal.reason == "content" and some_absent:
            self._lacking_since.setdefault(request_id, self._clock())
            if not self._has_waited(request_id):
                self._for_content.add(request_id)
                return True
        return False

    def take(self, *, some_absent: bool) -> list[str]:
        """Remove and return the requests to submit again: nothing is left to wait for, or their time has passed."""
        now = self._clock()
        taken = [
            request_id
            for request_id, need in self._for_files.items()
            if (need.answer_by is not None and now > need.answer_by) or not self._awaits_files(need)
        ]
        for request_id in taken:
            del self._for_files[request_id]
        lacking = {one for one in self._for_content if not some_absent or self._has_waited(one)}
        self._for_content -= lacking
        return [*taken, *sorted(lacking)]

    def take_lacking(self) -> list[str]:
        """Remove and return the requests that wait for a content: a replica has joined, which may have it."""
        taken, self._for_content = sorted(self._for_content), set()
        return taken

    def forget(self, request_id: str) -> None:
        """A request has ended. Unknown ids are ignored."""
        self._for_files.pop(request_id, None)
        self._for_content.discard(request_id)
        self._lacking_since.pop(request_id, None)

    def _has_waited(self, request_id: str) -> bool:
        return self._clock() - self._lacking_since[request_id] >= CONTENT_S

    def _awaits_files(self, need: Need) -> bool:
        if any(each.could_take(need) for each in self._router.replicas.values() if not each.draining):
            return False
        names = parts_of(need.adapter)
        return any(home.awaits_files(names) for home in self._adapters.homes.values())
