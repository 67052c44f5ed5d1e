"""A plain socket under RPyC."""

from __future__ import annotations

from rpyc.core.stream import SocketStream


class PlainStream(SocketStream):
    """The stream of a plain connection, used by both ends. Raises EOFError once the connection is closed, and if the
    peer reads nothing for the duration of the socket's timeout.
    """

    __slots__ = ()

    def write(self, data: bytes) -> None:
        """Writes without copying: RPyC's own method copies the remainder for each chunk, so that a raw 8K frame took
        half a minute.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[self.sock.send(view) :]
        except OSError as error:
            self.close()
            raise EOFError(error) from error
