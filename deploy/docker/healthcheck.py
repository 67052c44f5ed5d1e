"""Exits with code 0 if /health reports that the engine of the server in this container is alive."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request


def main() -> None:
    scheme = "https" if os.environ.get("VLORA_SERVE_TLS_CERT") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('VLORA_SERVE_HTTP_PORT', '8000')}/health"
    # The certificate names the host that clients use, not this address.
    context = ssl._create_unverified_context() if scheme == "https" else None  # noqa: SLF001
    # Bypass the environment's proxy: the server is in this container.
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=4) as answer:
            print(answer.read().decode())
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
