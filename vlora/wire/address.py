"""Addresses of listening sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from vlora.config import LOOPBACK_HOSTS
from vlora.errors import BadConfig


class Address(NamedTuple):
    """A host and a port (0: any free port), or a Unix socket's path."""

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST:PORT or unix:PATH. Raises BadConfig."""
        kind, colon, path = text.partition(":")
        if kind == "unix" and colon:
            if not path or len(os.fsencode(path)) > 100:  # the kernel's limit is 108 bytes
                raise BadConfig(f"address {text!r} has no path, or one of over 100 bytes; write unix:PATH")
            return cls("", 0, path)
        host, colon, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise BadConfig(f"address {text!r} is not valid; write HOST:PORT or unix:PATH")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        with contextlib.suppress(ValueError):
            return bool(self.path) or ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


log = logging.getLogger(__name__)


def secured(addresses: Sequence[str], *, has_tokens: bool) -> list[Address]:
    """Read addresses to listen on.

    Raises:
        BadConfig: An address is invalid or repeated, or other machines can reach it without a token.
    """
    found = [Address.parse(address) for address in addresses]
    for place, address in enumerate(found):
        if (address.path or address.port) and address in found[:place]:
            raise BadConfig(f"address {str(address)!r} is given twice; listen on it once")
        if not has_tokens and not address.is_local:
            raise BadConfig(
                f"address {str(address)!r} is not on this machine; without authentication a base model is served on "
                f"loopback only ({', '.join(LOOPBACK_HOSTS)}). Set tokens with --token-file or VLORA_TOKEN"
            )
    return found


def warn_of_no_tls(addresses: Sequence[Address]) -> None:
    """Write a line to the log for each address that other machines can reach."""
    for address in addresses:
        if not address.is_local:
            log.warning(
                "TLS is off: activations sent to %s can be read on the network; set --tls-cert and --tls-key", address
            )
