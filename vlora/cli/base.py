"""`vlora base`: the base model as a service, for trainings and inference of other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.interrupt import until_stopped
from vlora.cli.progress import waiting
from vlora.cli.serve import served_name
from vlora.cli.settings import EMBEDDED, model_path
from vlora.config import DTYPES, ServerConfig
from vlora.errors import BadConfig
from vlora.logging_format import JSON_VARIABLE, LEVEL_VARIABLE, LEVELS, configure

if TYPE_CHECKING:
    from vlora.split.serving import ServeSettings

DEFAULT_BIND = "127.0.0.1:18863"


@cli.group()
def base() -> None:
    """Serve a base model's layers to clients that train or run their own adapters.

    \b
        vlora base serve Qwen/Qwen2-VL-2B-Instruct
    """


@base.command("serve")
@click.argument("model", default=EMBEDDED)
@click.option(
    "--bind",
    "addresses",
    multiple=True,
    default=[DEFAULT_BIND],
    show_default=True,
    metavar="ADDRESS",
    help="HOST:PORT (port 0: any free one), or unix:PATH for shared memory on this machine; may be repeated.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Token file (YAML, see docs/api.md), in addition to VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
)
@click.option("--tls-cert", help="Certificate chain (PEM); TCP then accepts TLS only.")
@click.option("--tls-key", help="The certificate's private key (PEM).")
@click.option("--device", default="cpu", show_default=True, help="Device of the layers: cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Precision of the weights; auto: the checkpoint's.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a CPU. Default: the physical cores.")
@click.option("--shard", metavar="I/N", help="Serve one of N shards of every layer; clients connect to all of them.")
@click.option(
    "--max-wait-ms",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Maximum time that a call waits for others to be computed with.",
)
@click.option(
    "--join-rows",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Compute calls with more rows by themselves.",
)
@click.option("--max-rows", type=click.IntRange(min=1), default=4096, show_default=True, help="Maximum rows of a call.")
@click.option("--max-clients", type=click.IntRange(min=1), default=64, show_default=True, help="Maximum clients.")
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    envvar=LEVEL_VARIABLE,
    help="Level of the log on stderr; info writes a line per client.",
)
@needs("serve")
def serve(
    model: str,
    addresses: tuple[str, ...],
    token_file: Path | None,
    tls_cert: str | None,
    tls_key: str | None,
    device: str,
    dtype: str,
    threads: int | None,
    shard: str | None,
    max_wait_ms: float,
    join_rows: int,
    max_rows: int,
    max_clients: int,
    log_level: str,
) -> None:
    """Serve the frozen linear layers of MODEL until interrupted.

    \b
        vlora base serve --bind unix:/run/user/1000/base.sock
        vlora base serve Qwen/Qwen2-VL-2B-Instruct --bind 0.0.0.0:18863 --token-file tokens.yaml \\
            --tls-cert cert.pem --tls-key key.pem

    MODEL is a folder, a hub name, or the model in the package. Clients connect with `vlora.split.connect` (see
    docs/split.md). Without tokens the server binds to loopback only. --shard 1/2 and --shard 2/2 serve halves.
    """
    from vlora.server.security.access import read_tokens
    from vlora.split.addresses import secured, warn_of_no_tls

    os.environ |= {LEVEL_VARIABLE: log_level, JSON_VARIABLE: ""}
    configure(os.environ)
    tokens = read_tokens(token_file, os.environ)
    listening = secured(addresses, has_tokens=bool(tokens))
    if tls_cert is None:
        warn_of_no_tls(listening)
    security = ServerConfig(tls_cert=tls_cert, tls_key=tls_key, tokens=tokens)
    part = _shard(shard)
    with waiting(f"loading {model}") as loaded, until_stopped() as stop:
        from vlora.engine.host_resources import default_threads
        from vlora.split.admission import Limits
        from vlora.split.serving import ServeSettings
        from vlora.threads import compute_with

        compute_with(threads or default_threads())
        settings = ServeSettings(
            model=model_path(model, "MODEL"),
            name=served_name(model),
            dtype=dtype,
            device=device,
            shard=part,
            max_wait_s=max_wait_ms / 1e3,
            join_rows=join_rows,
            limits=Limits(max_rows=max_rows, max_clients=max_clients),
        )
        _serve(settings, addresses, security, loaded, stop)


def _serve(
    settings: ServeSettings,
    addresses: tuple[str, ...],
    security: ServerConfig,
    loaded: Callable[[], None],
    stop: threading.Event,
) -> None:
    """Serve until stopped. loaded: called before the line that clients may connect."""
    from vlora.split.serving import serve_base
    from vlora.wire.tls import server_context

    def announce(line: str) -> None:
        loaded()
        click.echo(line)

    serve_base(
        settings,
        addresses,
        announce=announce,
        stopped=stop.is_set,
        tokens=security.tokens,
        tls=server_context(security),
    )


def _shard(text: str | None) -> tuple[int, int]:
    """Read I/N, counted from 1."""
    if text is None:
        return 0, 1
    index, slash, number = text.partition("/")
    if not (slash and index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise BadConfig(f"--shard is {text!r}; write I/N, such as 1/2 and 2/2")
    return int(index) - 1, int(number)
