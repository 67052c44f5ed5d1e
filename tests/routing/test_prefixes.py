"""The index of first blocks: leading blocks only, bounded, expired like a cache's."""

from __future__ import annotations

from vlora.routing.prefixes import PrefixIndex


def keys(text: str) -> tuple[bytes, ...]:
    """Chained keys, as those of `TokenChain`: each includes all before it."""
    return tuple(text[: place + 1].encode() for place in range(len(text)))


def test_leading_blocks_are_counted_by_replica() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.add(name, 100)
    index.record("a", keys("frame"), 8)
    index.record("b", keys("fresh"), 8)
    assert index.known(keys("framed")) == {"a": 5, "b": 2}
    assert index.known(keys("other")) == index.known(()) == {}
    index.remove("a")
    assert index.known(keys("framed")) == {"b": 2} and len(index) == 5


def test_blocks_expire_with_the_blocks_computed_since() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    index.record("a", keys("old"), 4)
    index.record("a", keys("new"), 6)
    assert index.known(keys("old")) == {"a": 3}, "ten blocks fit"
    index.record("a", keys("new"), 5)
    assert index.known(keys("old")) == {} and index.known(keys("new")) == {"a": 3}


def test_use_renews_and_the_number_of_keys_is_bounded() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    index.record("a", keys("old"), 4)
    index.record("a", keys("x"), 5)
    index.record("a", keys("old"), 5)
    index.record("a", keys("y"), 5)
    assert index.known(keys("old")) == {"a": 3}
    index.add("b", 10**9)
    for number in range(20_000):
        index.record("b", (str(number).encode(),), 1)
    assert len(index) < 10_000 and index.known((b"19999",)) == {"b": 1} and index.known((b"1",)) == {}
