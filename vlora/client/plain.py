"""A plain socket under RPyC."""

from __future__ import annotations

from rpyc.core.stream import SocketStream


class PlainStream(SocketStream):
    """Used by both ends. Raises EOFError once the connection is gone, and when the peer takes nothing for as long as
    the socket's timeout."""

    __slots__ = ()

    def write(self, data: bytes) -> None:
        """RPyC's own copies all that is left for each piece it sends, so that a raw 8K frame took half a minute."""
        view = memoryview(data)
        try:
            while view:
                view = view[self.sock.send(view) :]
        except OSError as error:
            self.close()
            raise EOFError(error) from error
