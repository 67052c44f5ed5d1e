"""Keys of a prompt's first KV blocks, by which a router sends equal prompts to the replica that has their KV."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from vlora.types import Request

MAX_BLOCKS = 64
"""Later blocks rarely decide between replicas."""


def prefix_keys(request: Request, adapter: str, block_size: int) -> tuple[bytes, ...]:
    """The keys of the prompt's full blocks, at most `MAX_BLOCKS`. None for token ids that no engine accepts.

    Equal keys mean equal KV, like those of an engine's prefix cache. In contrast to these, a prompt with images shares
    no block with prompts that have other images, not even the text before them: a router knows no placeholder tokens.

    Args:
        adapter: Its adapter's name and content hash, or the name if the content is not known; empty for the base model.
    """
    images = [item.content_hash for item in request.vision]
    key = blake2b(repr((adapter, images)).encode(), digest_size=16).digest()
    keys = []
    for end in range(block_size, min(len(request.prompt_ids), MAX_BLOCKS * block_size) + 1, block_size):
        try:
            tokens = array("q", request.prompt_ids[end - block_size : end])
        except OverflowError:
            return ()  # an engine refuses the request with the reason
        key = blake2b(key + tokens.tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)
