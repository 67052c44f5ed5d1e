"""Options that select the server, and how a command prints."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import click

from vlora.config import ServerConfig
from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.client import Client


def server_option(command: Any) -> Any:
    """Passes the command a `client` of the server that the flags name. The token comes from VLORA_TOKEN only: every
    user of the machine can read a command line.
    """

    @functools.wraps(command)
    def with_client(*, server: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, **args: Any) -> Any:
        return command(client=client_of(server, tls_ca, tls_cert, tls_key), **args)

    for name, text in (
        ("key", "Private key of --tls-cert"),
        ("cert", "Client certificate to present to the server"),
        ("ca", "CA of the server's certificate; enables TLS"),
    ):
        variable = f"VLORA_TLS_{name.upper()}"
        with_client = click.option(f"--tls-{name}", envvar=variable, metavar="FILE", help=f"{text} (or {variable}).")(
            with_client
        )
    return click.option(
        "-s",
        "--server",
        envvar="VLORA_SERVER",
        default=f"{ServerConfig.host}:{ServerConfig.rpyc_port}",
        show_default=True,
        metavar="HOST:PORT",
        help="Address of `vlora serve` (or VLORA_SERVER).",
    )(with_client)


def wait_option(command: Any) -> Any:
    return click.option(
        "--wait-s",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="How long to wait at startup for a server that is not ready yet.",
    )(command)


def json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")(command)


def client_of(
    server: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, *, flag: str = "--server"
) -> Client:
    """flag: of the address, in errors. Raises BadConfig."""
    import ssl

    from vlora.client import Client

    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadConfig(f"{flag} is {server!r}; write HOST:PORT, with a port from 1 to 65535")
    if tls_cert is not None and tls_ca is None:
        raise BadConfig("--tls-cert requires TLS; also give --tls-ca")
    tls: ssl.SSLContext | None = None
    try:
        if tls_ca is not None:
            tls = ssl.create_default_context(cafile=tls_ca)
            if tls_cert is not None:
                tls.load_cert_chain(tls_cert, tls_key, password=lambda: "")
    except (OSError, ValueError) as error:
        given = ", ".join(repr(file) for file in (tls_ca, tls_cert, tls_key) if file is not None)
        raise BadConfig(f"the files of --tls-ca, --tls-cert and --tls-key cannot be used ({given}): {error}") from error
    return Client(host.strip("[]"), int(port), token=os.environ.get("VLORA_TOKEN") or None, tls=tls)


def print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value))
