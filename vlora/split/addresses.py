"""Checks of the addresses of base executors."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vlora.config import LOOPBACK_HOSTS
from vlora.errors import BadConfig
from vlora.wire.address import Address

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
