"""Messages about adapters, on the same connection as those of the engine. The replica's process answers them.

A front end offers a content. The replica answers with the folder in which it has it; otherwise its files follow in
pieces.
"""

from __future__ import annotations

import msgspec

from vlora.engine.operations import EngineOperation
from vlora.operations import Operation


class ShippedFile(msgspec.Struct, frozen=True):
    """One of `ADAPTER_FILES`."""

    name: str
    size: int


class Files(msgspec.Struct, frozen=True):
    """What a replica has of a content.

    Attributes:
        path: The folder with the content; empty: its files are to be sent.
        busy: Another process of the machine is receiving this content.
    """

    path: str = ""
    busy: bool = False


class Offer(Operation, frozen=True, kw_only=True):
    """Ask for the folder of a content. The replica holds the content from then on, until a `Hold` without it.

    Attributes:
        path: Where it may be on the replica's machine.
        files: Its files; empty if the front end does not have them.
        receive: Begin to receive them if they are not there.
        adapter_bytes: The limit of one content that is received.
        total_bytes: The limit of all received contents on the machine.
    """

    result = Files
    path: str
    version: str
    files: tuple[ShippedFile, ...]
    receive: bool
    adapter_bytes: int
    total_bytes: int


class Piece(Operation, frozen=True):
    """The next bytes of a file. Files come in the order of the offer."""

    result = Files
    version: str
    name: str
    data: bytes


class Finish(Operation, frozen=True):
    """All pieces were sent; or, if some were not, none follow."""

    result = Files
    version: str


class Hold(Operation, frozen=True):
    """These received contents are in use, and no others: they may be removed when others need the room."""

    result = Files
    versions: tuple[str, ...]


FilesOperation = Offer | Piece | Finish | Hold


class Lead(Operation, frozen=True):
    """The front end makes the changes. From now on the replica refuses those of front ends with an earlier term.

    Attributes:
        term: Larger than that of each front end that made them before.
    """

    term: int


decode_operation = msgspec.msgpack.Decoder(EngineOperation | FilesOperation | Lead).decode
