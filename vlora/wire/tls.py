"""TLS of listeners, and of clients that need no authority."""

from __future__ import annotations

import ssl
from typing import NamedTuple

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


class Certificate(NamedTuple):
    """A server's own certificate, as files in PEM. It may be signed by itself: the handshake covers it."""

    cert_file: str
    key_file: str

    def context(self) -> ssl.SSLContext:
        """Raises BadConfig if the files cannot be used."""
        context = server_context(ServerConfig(tls_cert=self.cert_file, tls_key=self.key_file))
        assert context is not None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def der(self) -> bytes:
        """The certificate that a peer sees: the first one in the file, which may also have text and a key.

        Raises BadConfig if there is none.
        """
        with open(self.cert_file, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        start, stop = text.find(begin), text.find(end, text.find(begin))
        if start < 0 or stop < 0:
            raise BadConfig(f"{self.cert_file} has no line {begin!r}; convert it with `openssl x509`")
        return ssl.PEM_cert_to_DER_cert(text[start : stop + len(end)])


def client_context() -> ssl.SSLContext:
    """For a server whose certificate the handshake checks, not an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
