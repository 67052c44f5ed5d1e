"""Requests to the hosts of URLs: an address is resolved once, checked, and used for the connection."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Any

import httpx

from vlora.errors import BadRequest

logging.getLogger("httpx").setLevel(logging.WARNING)  # below it logs whole URLs, which may contain secrets


def parse_url(url: str, what: str) -> httpx.URL:
    """An http or https URL. what: the subject of messages, which name at most the host. Raises BadRequest."""
    try:
        target = httpx.URL(url)
        if (target.port or 0) > 65535:
            raise ValueError("no such port")
    except (httpx.InvalidURL, ValueError) as error:
        raise BadRequest(f"{what}: the URL is invalid") from error
    if target.scheme not in ("http", "https"):
        raise BadRequest(f"{what}: unsupported URL scheme {target.scheme!r}; use http or https")
    if not target.host:
        raise BadRequest(f"{what}: the URL has no host")
    if target.userinfo:
        raise BadRequest(f"{what}: a URL must not contain a user name or password")
    return target


async def addresses_of(target: httpx.URL) -> list[str]:
    """The addresses of a URL's host. Raises OSError or UnicodeError if it cannot be resolved."""
    port = target.port or (443 if target.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(target.host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def request_to(address: str, target: httpx.URL, headers: dict[str, str]) -> dict[str, Any]:
    """Arguments of a request to a URL that connects to this address of its host."""
    extensions = {"sni_hostname": target.raw_host.decode("ascii")}
    headers = {"Host": target.netloc.decode("ascii"), **headers}
    return {"url": target.copy_with(host=address), "headers": headers, "extensions": extensions}


def is_public(address: str) -> bool:
    """Whether the address is globally routable and does not embed an IPv4 address (mapped addresses are unwrapped)."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            isatap = int(parsed) >> 32 & 0xFDFFFFFF == 0x00005EFE
            return parsed in _UNICAST and parsed.is_global and not isatap and not any(parsed in net for net in _TUNNELS)
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not parsed.is_multicast and not any(parsed in net for net in _SPECIAL)


_UNICAST = ipaddress.ip_network("2000::/3")
_TUNNELS = tuple(map(ipaddress.ip_network, ("2001::/23", "2002::/16", "64:ff9b::/96", "64:ff9b:1::/48")))
# IETF protocol assignments, 6to4 relays, and the host address of a cloud's virtual machines.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
