"""The page's three files. They contain no secret, so they need no token."""

from __future__ import annotations

from pathlib import Path

CONSOLE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/console": ("page.html", "text/html; charset=utf-8"),
    "/console/style.css": ("style.css", "text/css; charset=utf-8"),
    "/console/script.js": ("script.js", "text/javascript; charset=utf-8"),
}
"""URL path -> file in this folder and its media type."""

HEADERS = {
    # No other origin, nothing inline, no framing: adapter names are untrusted text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def read_file(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
