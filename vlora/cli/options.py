"""Options of several commands: headings in the help, flags as names, the server; and how a command prints."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.config import ServerConfig
from vlora.errors import BadRequest
from vlora.logging_format import LEVEL_VARIABLE, LEVELS

if TYPE_CHECKING:
    from vlora.client import Answer, Client

RULES = ("placed", "punica", "where_it_is", "least_loaded", "round_robin")
"""Of `vlora.routing`, which takes long to import."""


class HeadedOption(click.Option):
    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


def headed(heading: str, *names: str, **settings: Any) -> Any:
    """As `click.option`, under a heading."""
    return click.option(*names, cls=HeadedOption, heading=heading, **settings)


def long_flag(option: click.Option) -> str:
    """The flag without its dashes, "max-tokens": its name in config files, and in the environment in capitals."""
    return next(flag for flag in option.opts if flag.startswith("--")).removeprefix("--")


def write_headed(context: click.Context, formatter: click.HelpFormatter, params: list[click.Parameter]) -> None:
    """Write options by heading, in order of each heading's first option; those without one come last, as "Options"."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(context)
        if record is not None:
            rows.setdefault(param.heading if isinstance(param, HeadedOption) else "Options", []).append(record)
    for heading in sorted(rows, key="Options".__eq__):
        with formatter.section(heading):
            formatter.write_dl(rows[heading])


def check_given_once(flags: Mapping[str, Sequence[str]]) -> None:
    """Check the values of flags by name. Raises BadRequest for one that is given more than once."""
    for flag, values in flags.items():
        if repeated := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise BadRequest(f"{flag} {repeated[0]!r} is given more than once; give it once")


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
        help="Address of `vlora serve`, or several with commas (or VLORA_SERVER).",
    )(with_client)


def wait_option(command: Any) -> Any:
    return click.option(
        "--wait-s",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="How long to wait at startup for a server that is not ready yet.",
    )(command)


def answer_options(command: Any) -> Any:
    """What answers, and how long."""
    way = "Way to answer a domain's question. Default: the one that was more accurate on validation data."
    asked = "Adapter or domain to ask, or several adapters: a+b, 0.7*a+0.3*b. Default: the base model."
    for option in (
        click.option("--max-tokens", type=int, default=128, show_default=True, help="Maximum number of answer tokens."),
        click.option("--answer", type=click.Choice(["head", "words"]), help=way),
        click.option("--head", help="Task head of the adapter to use, with its own question."),
        click.option("-a", "--adapter", help=asked),
    ):
        command = option(command)
    return command


def how(answer: Answer) -> str:
    """The way and the confidence of an answer about a domain, to print behind it; empty for other answers."""
    if answer.domain is None:
        return ""
    by = "in words" if answer.result is None else f"head {answer.result.head}"
    sure = "" if answer.confidence is None else f"  {answer.confidence:.1%}"
    return f"{sure}  ({by})"


def token_file_option(command: Any) -> Any:
    return headed(
        "Network",
        "--token-file",
        type=click.Path(path_type=Path),
        help="Token file (YAML, see docs/api.md), in addition to VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
    )(command)


def log_level_option(info: str) -> Any:
    return headed(
        "Log",
        "--log-level",
        type=click.Choice(LEVELS),
        default="warning",
        show_default=True,
        envvar=LEVEL_VARIABLE,
        help=f"Level of the log on stderr; info writes {info}.",
    )


def json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")(command)


def server_options(command: Any) -> Any:
    return server_option(json_option(command))


def client_of(
    server: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, *, flag: str = "--server"
) -> Client:
    """flag: of the address, in errors. Raises BadConfig."""
    from vlora.client import Client
    from vlora.client.connection import addresses_of
    from vlora.client.sockets import client_context

    addresses_of(servers := server.split(","), flag)
    tls = client_context(tls_ca, tls_cert, tls_key)
    return Client(servers=servers, token=os.environ.get("VLORA_TOKEN") or None, tls=tls)


def print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value))
