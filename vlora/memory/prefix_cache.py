"""The prefix cache: maps content keys to full KV blocks. Bookkeeping only."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

from vlora.types import Request, VisionInput

Key = bytes
"""128-bit digest of a block's content and the key of the previous block."""


class TokenChain:
    """The keys of one request's blocks, computed lazily and once.

    A key covers the adapter's version, all tokens up to the block's end, and the content of its image and video
    placeholders (content hash and position within the item; the hash covers pixels, grids and frame timing). Equal keys
    imply equal KV, in any inference mode. Blocks that end before the adapter's first token have the base model's keys.
    """

    __slots__ = ("_adapter", "_adapter_from", "_answer", "_keys", "_prompt", "_read_from", "_visuals", "block_size")

    def __init__(self, request: Request, block_size: int, placeholders: Mapping[str, int]) -> None:
        self.block_size = block_size
        self._adapter = request.adapter
        self._adapter_from = request.adapter_from
        self._prompt = request.prompt_ids
        self._read_from = request.read_from
        self._answer = list(request.answered)
        self._keys: list[Key] = []
        self._visuals = [
            (token, _Cursor([item for item in request.vision if item.kind == kind]))
            for kind, token in placeholders.items()
        ]

    def append(self, token: int) -> None:
        self._answer.append(token)

    def may_find(self, place: int, device_len: int) -> bool:
        """Whether the block at `place` in the request's table may be taken from the cache.

        It may, unless the hidden state of one of its tokens is needed. That of the last of the `device_len` known
        tokens is always needed.
        """
        needed = device_len - 1 if self._read_from is None else min(device_len - 1, self._read_from)
        return (place + 1) * self.block_size <= needed

    def adapter_of(self, place: int) -> str | None:
        """The adapter that was active for any token of the block at `place`."""
        return self._adapter if (place + 1) * self.block_size > self._adapter_from else None

    def key(self, place: int) -> Key:
        """The key of the block at `place` in the request's table. All of its tokens must be known."""
        while len(self._keys) <= place:
            self._keys.append(self._digest(len(self._keys) * self.block_size))
        return self._keys[place]

    def _digest(self, start: int) -> Key:
        stop, num_prompt = start + self.block_size, len(self._prompt)
        tokens = self._prompt[start:stop]
        parent = self._keys[-1] if self._keys else bytes(16)
        if self._adapter is not None and start <= self._adapter_from < stop:
            begin = f"{self._adapter_from} {self._adapter}".encode()
            parent = blake2b(parent + begin, digest_size=16).digest()
        digest = blake2b(parent, digest_size=16)
        # In sampled tokens a placeholder id is an ordinary token without an image.
        visuals = [cursor.take(tokens.count(token)) for token, cursor in self._visuals]
        if stop > num_prompt:
            tokens += tuple(self._answer[max(0, start - num_prompt) : stop - num_prompt])
        assert len(tokens) == self.block_size, "the key of a block was requested before its tokens were known"
        digest.update(array("q", tokens).tobytes())
        digest.update(repr(visuals).encode())
        return digest.digest()


class _Cursor:
    """Iterates over the placeholder tokens of one kind, tracking the current item and the offset within it."""

    __slots__ = ("_items", "_offset")

    def __init__(self, items: Sequence[VisionInput]) -> None:
        self._items = [(item.content_hash, item.num_tokens) for item in reversed(items)]
        self._offset = 0

    def take(self, count: int) -> list[tuple[str, int, int]]:
        """Items of the next `count` placeholders: (content hash, first placeholder within the item, number)."""
        pieces: list[tuple[str, int, int]] = []
        while count:
            content, size = self._items[-1]
            taken = min(count, size - self._offset)
            pieces.append((content, self._offset, taken))
            count -= taken
            self._offset += taken
            if self._offset == size:
                self._items.pop()
                self._offset = 0
        return pieces


class _Known(NamedTuple):
    key: Key
    adapter: str | None


class PrefixCache:
    """Known blocks by key. `BlockManager` counts the users of a block; `PageAllocator` owns its pages.

    Args:
        placeholders: token id by kind of visual item ("image", "video").
    """

    def __init__(self, placeholders: Mapping[str, int]) -> None:
        self.placeholders = placeholders
        self._blocks: dict[Key, int] = {}
        self._known: dict[int, _Known] = {}

    @property
    def keys(self) -> Set[Key]:
        return self._blocks.keys()

    @property
    def blocks(self) -> Set[int]:
        return self._known.keys()

    def find(self, key: Key) -> int | None:
        """The block with the content of `key`; None if unknown."""
        return self._blocks.get(key)

    def add(self, key: Key, block: int, adapter: str | None) -> None:
        """Register a full block, which is read-only from now on. For duplicate keys the first block is kept."""
        if key not in self._blocks:
            assert block not in self._known, f"block {block} is known and was written"
            self._blocks[key] = block
            self._known[block] = _Known(key, adapter)

    def remove(self, block: int) -> None:
        """Remove a block after its content was discarded or became invalid."""
        del self._blocks[self._known.pop(block).key]

    def rename(self, block: int, target: int) -> None:
        """Update the number of a moved block; unknown blocks are ignored."""
        if (known := self._known.pop(block, None)) is not None:
            self._blocks[known.key] = target
            self._known[target] = known

    def blocks_of(self, adapter: str) -> list[int]:
        return [block for block, known in self._known.items() if known.adapter == adapter]

    def check_integrity(self) -> None:
        """Assert that keys and blocks map to each other."""
        assert len(self._blocks) == len(self._known), f"{len(self._blocks)} keys map to {len(self._known)} blocks"
        assert all(self._known[block].key == key for key, block in self._blocks.items()), "a key maps to a wrong block"
