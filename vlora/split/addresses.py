"""Addresses of base executors."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from vlora.config import LOOPBACK_HOSTS
from vlora.errors import BadConfig

log = logging.getLogger(__name__)


class Address(NamedTuple):
    """A Unix socket's path, or a host and a port (0: any free port)."""

    path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read unix:PATH or HOST:PORT. Raises BadConfig."""
        kind, colon, path = text.partition(":")
        if kind == "unix" and colon:
            if not path or len(os.fsencode(path)) > 100:  # the kernel's limit is 108 bytes
                raise BadConfig(f"address {text!r} has no path, or one of over 100 bytes; write unix:PATH")
            return cls(path, "", 0)
        host, colon, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise BadConfig(f"address {text!r} is not valid; write HOST:PORT or unix:PATH")
        return cls("", host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        return bool(self.path) or self.host in LOOPBACK_HOSTS


def secured(addresses: Sequence[str], *, has_tokens: bool, has_tls: bool) -> list[Address]:
    """Read addresses to listen on. Warns about those that other machines can reach without TLS.

    Raises:
        BadConfig: An address is invalid, or other machines can reach it without a token.
    """
    found = [Address.parse(address) for address in addresses]
    for text, address in zip(addresses, found, strict=True):
        if address.is_local:
            continue
        if not has_tokens:
            raise BadConfig(
                f"address {text!r} is not on this machine; without authentication a base model is served on loopback "
                f"only ({', '.join(LOOPBACK_HOSTS)}). Set tokens with --token-file or VLORA_TOKEN"
            )
        if not has_tls:
            log.warning(
                "TLS is off: activations sent to %s can be read on the network; set --tls-cert and --tls-key", text
            )
    return found
