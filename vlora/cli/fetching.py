"""Fetches images by URL on the client side, for servers that do not fetch URLs."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request

from vlora.errors import BadImage, TooLarge

MAX_BYTES = 64 * 2**20  # above every server's default; the server's own limit applies
TIMEOUT_S = 30.0


def fetch_picture(url: str) -> bytes:
    """Fetch an encoded image, through the proxy of the environment if set (HTTPS_PROXY, NO_PROXY).

    Raises:
        BadImage: the URL cannot be fetched, or does not contain an image.
        TooLarge: it has more than 64 MiB.
    """
    host: str | None = None
    try:
        host = urllib.parse.urlsplit(url).hostname
        request = urllib.request.Request(url, headers={"Accept": "image/*", "User-Agent": "vlora"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            kind = response.headers.get_content_type()
            body = bytes(response.read(MAX_BYTES + 1))
    except urllib.error.HTTPError as error:
        raise BadImage(f"the picture cannot be fetched from {host!r}: status {error.code}") from error
    except urllib.error.URLError as error:
        why = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise BadImage(f"the picture cannot be fetched from {host!r}: {why or error.reason}") from error
    except TimeoutError as error:
        raise BadImage(f"the picture cannot be fetched from {host!r}: no answer within {TIMEOUT_S:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadImage(f"the picture cannot be fetched from {url[:100]!r}; check the URL") from error
    if kind.partition("/")[0] in ("text", "audio", "video"):
        raise BadImage(f"{host!r} sent {kind!r}; an image is expected")
    if len(body) > MAX_BYTES:
        raise TooLarge(f"the picture from {host!r} has over {MAX_BYTES} bytes; send a smaller one")
    return body
