"""`vlora base`: the base model as a service, for trainings and inference of other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from vlora.cli.group import cli
from vlora.cli.interrupt import until_stopped
from vlora.cli.options import EMBEDDED, TOKEN_FILE, command, flag, log_level, model_path, settings_of
from vlora.cli.progress import waiting
from vlora.cli.serve import served_base, served_name
from vlora.config import EngineConfig, ServerConfig
from vlora.logging_format import JSON_VARIABLE, LEVEL_VARIABLE, configure
from vlora.split.config import BaseConfig

DEFAULT_BIND = "127.0.0.1:18863"


@cli.group()
def base() -> None:
    """Serve a base model's layers to clients that train or run their own adapters.

    \b
        vlora base serve Qwen/Qwen2-VL-2B-Instruct
    """


@command(base, "serve", needs="serve")
@click.argument("model", default=EMBEDDED)
def serve(
    model: str,
    engine: dict[str, Any] = settings_of(EngineConfig, "device", "dtype", "threads"),
    addresses: tuple[str, ...] = flag(
        (DEFAULT_BIND,),
        "HOST:PORT (port 0: any free one), or unix:PATH for shared memory on this machine; may be repeated.",
        "--bind",
        metavar="ADDRESS",
    ),
    token_file: Path | None = TOKEN_FILE,
    tls: dict[str, Any] = settings_of(ServerConfig, "tls_cert", "tls_key"),
    batching: dict[str, Any] = settings_of(BaseConfig),
    log_level: str = log_level("a line per client"),
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

    os.environ |= {LEVEL_VARIABLE: log_level, JSON_VARIABLE: ""}
    configure(os.environ)
    security = ServerConfig(**tls, tokens=read_tokens(token_file, os.environ))
    served = served_base(addresses, served_name(model), security)
    threads = engine.pop("threads")
    config = BaseConfig(model=model_path(model, "MODEL"), **engine, **batching)
    with waiting(f"loading {model}") as loaded, until_stopped() as stop:
        from vlora.engine.host_resources import default_threads
        from vlora.split.serving import serve_base
        from vlora.threads import compute_with

        def announce(line: str) -> None:
            loaded()
            click.echo(line)

        compute_with(threads or default_threads())
        serve_base(config, served, announce=announce, stopped=stop.is_set)
