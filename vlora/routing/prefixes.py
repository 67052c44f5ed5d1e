"""Which replica has computed which first KV blocks: an estimate of their prefix caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MOST_KEYS = 8192  # per replica
_FIRST_BLOCKS = 64  # of a request; later blocks rarely decide between replicas


class PrefixIndex:
    """The first blocks of the requests that each replica was sent.

    A prefix cache discards the least recently used blocks when its memory is needed. The index does the same without a
    clock: it counts the blocks that a replica was given to compute, and a key expires once as many blocks as the
    replica has were computed since its last use. The number of keys per replica is limited.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, int] = {}  # capacity, by replica
        self._computed: dict[str, int] = {}  # blocks so far, by replica
        self._used: dict[str, dict[bytes, int]] = {}  # by replica and key: `computed` at its last use, oldest first
        self._replicas: dict[bytes, set[str]] = {}  # by key

    def __len__(self) -> int:
        return sum(map(len, self._used.values()))

    def add(self, name: str, blocks: int) -> None:
        """A replica with so many KV blocks has joined; its cache is empty."""
        self._blocks[name] = blocks
        self._computed[name] = 0
        self._used[name] = {}

    def remove(self, name: str) -> None:
        """A replica has left."""
        for key in self._used.pop(name):
            self._discard(key, name)
        del self._blocks[name], self._computed[name]

    def record(self, name: str, keys: Sequence[bytes], blocks: int) -> None:
        """A request with these first blocks, and so many blocks in all, was sent to a replica."""
        used = self._used[name]
        self._computed[name] = now = self._computed[name] + blocks
        for key in keys[:_FIRST_BLOCKS]:
            if used.pop(key, None) is None:
                self._replicas.setdefault(key, set()).add(name)
            used[key] = now
        while used and (len(used) > _MOST_KEYS or now - next(iter(used.values())) > self._blocks[name]):
            key = next(iter(used))
            del used[key]
            self._discard(key, name)

    def known(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """By replica, the number of leading keys that it is expected to have; only replicas with at least one."""
        found: dict[str, int] = {}
        left = self._replicas.get(keys[0], set()) if keys else set()
        for place, key in enumerate(keys[:_FIRST_BLOCKS]):
            left = left & self._replicas.get(key, set())
            if not left:
                break
            found.update(dict.fromkeys(left, place + 1))
        return found

    def _discard(self, key: bytes, name: str) -> None:
        replicas = self._replicas[key]
        replicas.discard(name)
        if not replicas:
            del self._replicas[key]
