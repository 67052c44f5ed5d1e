"""Requests that wait until the files of their adapters have been sent to a replica.

They wait beside the router's queue: its first request would hold up all others.
"""

from __future__ import annotations

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.former_contents import parts_of
from vlora.routing import Need, Router


class AwaitedFiles:
    """The requests by id, each until it is removed or taken."""

    def __init__(self, router: Router, adapters: ReplicatedAdapters) -> None:
        self._router = router
        self._adapters = adapters
        self._needs: dict[str, Need] = {}

    def add(self, need: Need) -> bool:
        """A request that the router has refused waits if files for it are being sent. Returns whether it does."""
        if not self._is_awaited(need):
            return False
        self._needs[need.request_id] = need
        return True

    def remove(self, request_id: str) -> None:
        """A request has ended. Unknown ids are ignored."""
        self._needs.pop(request_id, None)

    def take(self, now: float) -> list[str]:
        """Remove and return those to submit again: they wait for no files any more, or the router refuses them."""
        taken = []
        for request_id, need in self._needs.items():
            is_late = need.answer_by is not None and now > need.answer_by
            if is_late or not self._is_awaited(need):
                taken.append(request_id)
        for request_id in taken:
            del self._needs[request_id]
        return taken

    def _is_awaited(self, need: Need) -> bool:
        if any(each.could_take(need) for each in self._router.replicas.values() if not each.draining):
            return False
        names = parts_of(need.adapter)
        return any(home.awaits_files(names) for home in self._adapters.homes.values())
