"""Web sites on this machine, for tests of what fetches pictures."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any, NamedTuple


class Page(NamedTuple):
    """location: where it redirects to. sized: with the header Content-Length. wait: called before the answer."""

    body: bytes = b""
    kind: str = "image/png"
    status: int = 200
    location: str = ""
    sized: bool = True
    wait: Callable[[], object] = lambda: None


class Site(NamedTuple):
    """requested: the path and headers of each request."""

    port: int
    requested: list[tuple[str, Message]]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.contextmanager
def site(page: Callable[[str], Page]) -> Iterator[Site]:
    """A site until the end of the block. page: for each path."""
    requested: list[tuple[str, Message]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append((self.path, self.headers))
            found = page(self.path)
            found.wait()
            self.send_response(found.status)
            self.send_header("Content-Type", found.kind)
            if found.sized:
                self.send_header("Content-Length", str(len(found.body)))
            if found.location:
                self.send_header("Location", found.location)
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(server.server_address[1], requested)
        server.shutdown()
