"""Checks a message's unpacked size before unpacking: one byte of RPyC's serialization can expand to a hundred."""

from __future__ import annotations

from struct import Struct

from rpyc.core import brine

MAX_VALUES = 65_536  # a request has its images and some tens of values
MAX_DEPTH = 32

_ALONE = frozenset(
    (
        *brine.IMM_INTS_LOADER,
        brine.TAG_NONE,
        brine.TAG_TRUE,
        brine.TAG_FALSE,
        brine.TAG_EMPTY_STR,
        brine.TAG_EMPTY_TUPLE,
        brine.TAG_NOT_IMPLEMENTED,
        brine.TAG_ELLIPSIS,
    )
)
_BYTES = {
    brine.TAG_STR1: 1,
    brine.TAG_STR2: 2,
    brine.TAG_STR3: 3,
    brine.TAG_STR4: 4,
    brine.TAG_FLOAT: brine.F8.size,
    brine.TAG_COMPLEX: brine.C16.size,
}
_COUNTED_BYTES = {
    brine.TAG_STR_L1: brine.I1,
    brine.TAG_INT_L1: brine.I1,
    brine.TAG_STR_L4: brine.I4,
    brine.TAG_INT_L4: brine.I4,
}
_VALUES = {
    brine.TAG_UNICODE: 1,
    brine.TAG_SLICE: 1,
    brine.TAG_FSET: 1,
    brine.TAG_TUP1: 1,
    brine.TAG_TUP2: 2,
    brine.TAG_TUP3: 3,
    brine.TAG_TUP4: 4,
}
_COUNTED_VALUES = {brine.TAG_TUP_L1: brine.I1, brine.TAG_TUP_L4: brine.I4}


def check_values(data: bytes, place: int) -> None:
    """Walk over the value at `place`. Raises ValueError for invalid data, too many values or too deep nesting.

    No value is created, so the cost depends on the number of values, not on the number of bytes.
    """
    left = [1]  # remaining values, by depth
    for _ in range(MAX_VALUES + 1):
        while left and not left[-1]:
            left.pop()
        if not left:
            return
        left[-1] -= 1
        tag = data[place : place + 1]
        place += 1
        if tag in _ALONE:
            continue
        if tag in _BYTES:
            place += _BYTES[tag]
        elif tag in _COUNTED_BYTES:
            head = _COUNTED_BYTES[tag]
            place += head.size + _unpack(head, data, place)
        elif tag in _VALUES:
            left.append(_VALUES[tag])
        elif tag in _COUNTED_VALUES:
            head = _COUNTED_VALUES[tag]
            left.append(_unpack(head, data, place))
            place += head.size
        else:
            raise ValueError("a message is invalid or truncated")
        if len(left) > MAX_DEPTH:
            raise ValueError(f"a message nests values over {MAX_DEPTH} deep")
    raise ValueError(f"a message has over {MAX_VALUES} values")


def _unpack(head: Struct, data: bytes, place: int) -> int:
    if place + head.size > len(data):
        raise ValueError("a message is invalid or truncated")
    count: int = head.unpack_from(data, place)[0]
    return count
