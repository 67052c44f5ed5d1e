"""Requests that may be the cause of replicas' deaths: one at a time runs, so that the next death finds the cause."""

from __future__ import annotations


class Suspects:
    """Their ids in order; the first one runs."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def add(self, request_id: str) -> bool:
        """Add a request, unless it is a suspect already. Returns whether it may run now."""
        if request_id not in self._ids:
            self._ids.append(request_id)
        return self._ids[0] == request_id

    def remove(self, request_id: str) -> str | None:
        """Remove a request that has ended, if it is a suspect. Returns the one that may run now."""
        if request_id not in self._ids:
            return None
        was_first = self._ids[0] == request_id
        self._ids.remove(request_id)
        return self._ids[0] if was_first and self._ids else None
