"""Server-side TLS."""

from __future__ import annotations

import ssl

from vlora.config import ServedBase, ServerConfig
from vlora.errors import BadConfig


def server_context(config: ServerConfig | ServedBase) -> ssl.SSLContext | None:
    """The TLS context of a listener; None without a certificate. Raises BadConfig for unusable files."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An encrypted key would prompt for its password on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"tls_cert {config.tls_cert!r} and tls_key {config.tls_key!r} cannot be used (PEM files with an "
            f"unencrypted key are expected): {error}"
        ) from error
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ValueError) as error:
            raise BadConfig(f"tls_client_ca {config.tls_client_ca!r} cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
