"""Which full KV blocks hold what: a block is known by everything its content was made from. Books only."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

from vlora.types import Request, VisionInput

Key = bytes
"""128 bits: a digest over a block's content and the key of the block before it."""


class TokenChain:
    """The keys of one request's blocks, each made once, when it is first asked for.

    A key covers the adapter's version, all tokens up to the block's end, and what its image and video placeholders
    stand for (content hash and place within the item; the hash covers pixels, grids and frame timing). Equal keys mean
    equal KV, whatever the mode it was computed in.

    placeholders: token id by kind of visual item.
    """

    __slots__ = ("_answer", "_keys", "_prompt", "_read_from", "_root", "_visuals", "adapter", "block_size")

    def __init__(self, request: Request, block_size: int, placeholders: Mapping[str, int]) -> None:
        self.block_size = block_size
        self.adapter = request.adapter
        self._prompt = request.prompt_ids
        self._read_from = request.read_from
        self._answer: list[int] = []
        self._root = b"" if request.adapter is None else request.adapter.encode()
        self._keys: list[Key] = []
        self._visuals = [
            (token, _Cursor([item for item in request.vision if item.kind == kind]))
            for kind, token in placeholders.items()
        ]

    def append(self, token: int) -> None:
        """The request was answered with one more token."""
        self._answer.append(token)

    def may_find(self, place: int, device_len: int) -> bool:
        """Whether the block at a place of the request's table may be one that was computed before: it holds no token
        whose hidden state is needed, which the last of the `device_len` known tokens' is in any case."""
        needed = device_len - 1 if self._read_from is None else min(device_len - 1, self._read_from)
        return (place + 1) * self.block_size <= needed

    def key(self, place: int) -> Key:
        """The key of the block at a place of the request's table, all of whose tokens must be known."""
        while len(self._keys) <= place:
            self._keys.append(self._digest(len(self._keys) * self.block_size))
        return self._keys[place]

    def _digest(self, start: int) -> Key:
        stop, num_prompt = start + self.block_size, len(self._prompt)
        tokens = self._prompt[start:stop]
        # The first key starts from the adapter, hashed to the length of a key.
        parent = self._keys[-1] if self._keys else blake2b(self._root, digest_size=16).digest()
        digest = blake2b(parent, digest_size=16)
        # In an answer a placeholder's id is a token like any other: it stands for nothing.
        visuals = [cursor.take(tokens.count(token)) for token, cursor in self._visuals]
        if stop > num_prompt:
            tokens += tuple(self._answer[max(0, start - num_prompt) : stop - num_prompt])
        assert len(tokens) == self.block_size, "a block's key was asked for before its tokens were known"
        digest.update(array("q", tokens).tobytes())
        digest.update(repr(visuals).encode())
        return digest.digest()


class _Cursor:
    """Goes through the placeholder tokens of one kind: whose the next one is, and which of its own."""

    __slots__ = ("_items", "_offset")

    def __init__(self, items: Sequence[VisionInput]) -> None:
        self._items = [(item.content_hash, item.num_tokens) for item in reversed(items)]
        self._offset = 0

    def take(self, count: int) -> list[tuple[str, int, int]]:
        """Items of the next `count` placeholders: (content hash, first placeholder of the item, how many)."""
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
    """Known blocks by key. Who uses a block is in `BlockTables`; who may take its pages, in `ArenaBooks`.

    placeholders: token id by kind of visual item ("image", "video").
    """

    def __init__(self, placeholders: Mapping[str, int]) -> None:
        self.placeholders = placeholders
        self._blocks: dict[Key, int] = {}
        self._known: dict[int, _Known] = {}

    @property
    def keys(self) -> Set[Key]:
        """Keys of all known blocks."""
        return self._blocks.keys()

    @property
    def blocks(self) -> Set[int]:
        """All known blocks."""
        return self._known.keys()

    def find(self, key: Key) -> int | None:
        """The block that holds what `key` stands for."""
        return self._blocks.get(key)

    def learn(self, key: Key, block: int, adapter: str | None) -> None:
        """A block's content is complete; nobody may write to it from now on. Of two equal ones the first stays."""
        if key not in self._blocks:
            assert block not in self._known, f"block {block} was written although it was known"
            self._blocks[key] = block
            self._known[block] = _Known(key, adapter)

    def drop(self, block: int) -> None:
        """A block's content is gone, or may not be used any more."""
        del self._blocks[self._known.pop(block).key]

    def rename(self, block: int, target: int) -> None:
        """What a block holds lies in another one now; unknown blocks are ignored."""
        if (known := self._known.pop(block, None)) is not None:
            self._blocks[known.key] = target
            self._known[target] = known

    def blocks_of(self, adapter: str) -> list[int]:
        """Blocks computed with one version of an adapter."""
        return [block for block, known in self._known.items() if known.adapter == adapter]

    def check_integrity(self) -> None:
        """Prove that keys and blocks name each other."""
        assert len(self._blocks) == len(self._known), f"{len(self._blocks)} keys name {len(self._known)} blocks"
        assert all(self._known[block].key == key for key, block in self._blocks.items()), "a key names another's block"
