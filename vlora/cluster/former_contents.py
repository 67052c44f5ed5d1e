"""Contents that adapters had before, which replicas keep while answers that began with them are not complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from vlora.errors import BadRequest
from vlora.types import composed_of

MAX_FORMER = 4
"""Former contents of one adapter. Answers with earlier ones end where they are; elsewhere they cannot continue."""

_Content = tuple[str, str]


@dataclass(eq=False)
class _Former:
    """One content. kept: replicas keep it without a request. users: ids of requests that may have begun with it."""

    kept: bool
    users: set[str] = field(default_factory=set)
    changing: bool = True


class FormerContents:
    """The former contents that unfinished requests may need, by adapter and hash.

    Attributes:
        linger_s: How long they are kept at least, until other front ends have asked for those that they need.
    """

    def __init__(
        self, unfinished: Callable[[], Iterable[tuple[str, str | None]]], on_end: Callable[[str, str], None]
    ) -> None:
        """Begin without any.

        Args:
            unfinished: The ids and adapters of the unfinished requests.
            on_end: Called with the adapter and the hash of a content that no request needs any more.
        """
        self._unfinished = unfinished
        self._on_end = on_end
        self.linger_s = 0.0
        self._contents: dict[_Content, _Former] = {}  # the oldest first

    def __contains__(self, content: object) -> bool:
        return content in self._contents

    def __iter__(self) -> Iterator[_Content]:
        return iter(tuple(self._contents))

    @property
    def kept(self) -> dict[str, tuple[str, ...]]:
        kept = [content for content, former in self._contents.items() if former.kept]
        return {name: tuple(version for own, version in kept if own == name) for name, _ in kept}

    def begin(self, name: str, version: str, *, kept: bool = True) -> None:
        """A change begins, after which the name may no longer have this content. kept: replicas keep it."""
        self._contents.pop((name, version), None)
        self._contents[name, version] = _Former(kept)
        own = [content for content in self._contents if content[0] == name]
        for content in own[: -MAX_FORMER - 1]:  # one may be the new content of a change
            self.drop(*content)

    def end(self, name: str, version: str) -> None:
        """No further request begins with the content, if a change is under way: it is kept for the present ones."""
        former = self._contents.get((name, version))
        if former is not None and former.changing:
            if self.linger_s:
                asyncio.get_running_loop().call_later(self.linger_s, self._end, name, version, former)
            else:
                self._end(name, version, former)

    def _end(self, name: str, version: str, former: _Former) -> None:
        if self._contents.get((name, version)) is former and former.changing:
            former.changing = False
            former.users = {request_id for request_id, adapter in self._unfinished() if name in parts_of(adapter)}
            self._end_unused([(name, version)])

    def drop(self, name: str, version: str) -> None:
        """The content is the present one again, or is not kept any more."""
        if self._contents.pop((name, version), None) is not None:
            self._on_end(name, version)

    def request_ended(self, request_id: str) -> None:
        if self._contents:
            for former in self._contents.values():
                former.users.discard(request_id)
            self._end_unused(tuple(self._contents))

    def _end_unused(self, contents: Iterable[_Content]) -> None:
        for content in contents:
            former = self._contents[content]
            if not former.users and not former.changing:
                del self._contents[content]
                self._on_end(*content)


def parts_of(adapter: str | None) -> tuple[str, ...]:
    """The names of the adapters that a request uses. A name that is invalid has none: replicas refuse it."""
    try:
        return () if adapter is None else tuple(part.adapter for part in composed_of(adapter))
    except BadRequest:
        return ()
