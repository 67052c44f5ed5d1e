"""Web sites on this machine, for tests of what fetches pictures."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import Any, NamedTuple


class Page(NamedTuple):
    """location: where it redirects to. sized: with the header Content-Length. wait: called before the answer. headers:
    further ones."""

    body: bytes = b""
    kind: str = "image/png"
    status: int = 200
    location: str = ""
    sized: bool = True
    wait: Callable[[], object] = lambda: None
    headers: Mapping[str, str] = {}


class Site(NamedTuple):
    """requested: the path and headers of each request. bodies: of requests that have one."""

    port: int
    requested: list[tuple[str, Message]]
    bodies: list[bytes]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.contextmanager
def site(page: Callable[[str], Page]) -> Iterator[Site]:
    """A site until the end of the block. page: for each path."""
    requested: list[tuple[str, Message]] = []
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append((self.path, self.headers))
            if size := int(self.headers.get("Content-Length", 0)):
                bodies.append(self.rfile.read(size))
            found = page(self.path)
            found.wait()
            self.send_response(found.status)
            self.send_header("Content-Type", found.kind)
            if found.sized:
                self.send_header("Content-Length", str(len(found.body)))
            if found.location:
                self.send_header("Location", found.location)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(server.server_address[1], requested, bodies)
        server.shutdown()
