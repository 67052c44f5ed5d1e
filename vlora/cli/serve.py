"""`vlora serve`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import click

from vlora.cli.cluster_options import RULES
from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.options import HeadedOption
from vlora.cli.progress import waiting
from vlora.cli.settings import EMBEDDED, config_flags, make_config, model_path
from vlora.config import EngineConfig, ServerConfig
from vlora.errors import BadAdapter, BadConfig
from vlora.logging_format import JSON_VARIABLE, LEVEL_VARIABLE, LEVELS, configure


@cli.command()
@click.option(
    "-m",
    "--model",
    cls=HeadedOption,
    heading="Model",
    default=EMBEDDED,
    show_default=True,
    help="Folder, hub name, or the model in the package.",
)
@click.option(
    "--served-model-name",
    cls=HeadedOption,
    heading="Model",
    metavar="NAME",
    help="The base model's name in requests. Default: the folder's name, or the hub name.",
)
@click.option(
    "-a",
    "--adapter",
    "adapters",
    cls=HeadedOption,
    heading="Adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="Serve this adapter; may be repeated.",
)
@click.option(
    "--adapters",
    "folder",
    cls=HeadedOption,
    heading="Adapters",
    type=click.Path(path_type=Path),
    help="Serve every adapter folder in this folder.",
)
@click.option(
    "--replicas",
    cls=HeadedOption,
    heading="Replicas",
    type=int,
    default=1,
    show_default=True,
    help="Number of engines on this machine; more than one needs Ray.",
)
@click.option(
    "--max-replicas",
    cls=HeadedOption,
    heading="Replicas",
    type=int,
    help="Limit of `vlora cluster scale`.  [default: --replicas]",
)
@click.option(
    "--routing-rule",
    cls=HeadedOption,
    heading="Replicas",
    type=click.Choice(RULES),
    default="placed",
    show_default=True,
    help="Which replica gets the next request.",
)
@click.option(
    "--adapter-state",
    cls=HeadedOption,
    heading="Replicas",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Keep the adapters, as changed while it serves, in this folder, and serve them again after a restart.",
)
@click.option(
    "--token-file",
    cls=HeadedOption,
    heading="Network",
    type=click.Path(path_type=Path),
    help="Token file (YAML, see docs/api.md), in addition to VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
)
@click.option(
    "--log-level",
    cls=HeadedOption,
    heading="Log",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    envvar=LEVEL_VARIABLE,
    help="Level of the log on stderr; info writes a line per request.",
)
@click.option(
    "--log-json",
    cls=HeadedOption,
    heading="Log",
    is_flag=True,
    envvar=JSON_VARIABLE,
    help="Write the log as JSON lines.",
)
@config_flags(EngineConfig, skip=("model",))
@config_flags(ServerConfig, skip=("tokens",))
@needs("serve")
def serve(
    model: str,
    served_model_name: str | None,
    adapters: tuple[str, ...],
    folder: Path | None,
    replicas: int,
    max_replicas: int | None,
    routing_rule: str,
    adapter_state: Path | None,
    token_file: Path | None,
    log_level: str,
    log_json: bool,
    **settings: Any,
) -> None:
    """Serve a model and its adapters until interrupted.

    \b
        vlora serve --adapters out/adapters
        vlora serve --model Qwen/Qwen2-VL-2B-Instruct --adapter signs=adapters/signs
    """
    from vlora.server.security.tokens import read_tokens

    os.environ |= {LEVEL_VARIABLE: log_level, JSON_VARIABLE: "1" if log_json else ""}
    configure(os.environ)
    check_replicas(replicas, max_replicas, settings.get("train"))
    if adapter_state is not None and replicas == 1:
        raise BadConfig(f"--adapter-state {adapter_state} is for replicas; start 2 or more with --replicas")
    named = named_adapters(adapters, folder)
    model_name = served_name(model) if served_model_name is None else served_model_name
    if not model_name.strip():
        raise BadConfig("the base model's name is empty; give a --served-model-name")
    if model_name in named:
        raise BadConfig(f"adapter {model_name!r} has the base model's name; rename it or give a --served-model-name")
    if (plan := settings.get("train")) is not None:
        from vlora.training.plan import read_plan

        settings["train"] = os.path.abspath(os.path.expanduser(plan))
        read_plan(settings["train"])  # an error is reported before the model loads
    engine_config = make_config(EngineConfig, settings, model=model_path(model))
    all_tokens = functools.partial(read_tokens, token_file, os.environ)
    server_config = make_config(ServerConfig, settings, tokens=all_tokens())
    import asyncio

    from vlora.server.launch import serve as serve_until_stopped

    with waiting(f"loading {model}") as loaded:

        def announce(line: str) -> None:
            loaded()
            click.echo(line)

        asyncio.run(
            serve_until_stopped(
                engine_config,
                server_config,
                named,
                announce=announce,
                model_name=model_name,
                read_tokens=None if token_file is None else all_tokens,
                replicas=replicas,
                max_replicas=max_replicas,
                routing_rule=routing_rule,
                adapter_state=None if adapter_state is None else str(adapter_state),
            )
        )
    # Skip torch's teardown, which only delays the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def check_replicas(number: int, most: int | None, plan: str | None) -> None:
    """Raises BadConfig for a number below 1 or over the limit, and for several with a plan or without a usable Ray.

    Ray is not imported.

    Args:
        number: Of replicas.
        most: The limit of that number later.
        plan: Of trainings; replicas would train the same adapters in the same folder.
    """
    if number < 1:
        raise BadConfig(f"--replicas is {number}; at least one engine serves")
    if most is not None and (number == 1 or most < number):
        raise BadConfig(f"--max-replicas is {most}, and --replicas {number}; start 2 or more replicas, at most as many")
    if number > 1 and plan is not None:
        raise BadConfig(f"--train {plan} needs --replicas 1 (now {number}): one engine trains; serve it separately")
    if number > 1:
        from vlora.cluster.on_ray.settings import check_ray

        check_ray(number)


def served_name(model: str) -> str:
    """A folder's base name (its location is not exposed to clients), or a hub name unchanged."""
    folder = Path(model).expanduser()
    return folder.resolve().name if model != EMBEDDED and folder.is_dir() else model


def named_adapters(pairs: tuple[str, ...], folder: Path | None) -> dict[str, str]:
    """Name -> absolute path. Raises BadConfig for malformed or duplicate pairs, BadAdapter for a folder without
    adapters.
    """
    found: dict[str, str] = {}
    if folder is not None:
        for config in sorted(folder.glob("*/adapter_config.json")):
            found[config.parent.name] = str(config.parent.resolve())
        if not found:
            raise BadAdapter(f"{folder}: contains no folder with an adapter_config.json")
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise BadConfig(f"--adapter is {pair!r}; write NAME=PATH")
        if name in found:
            raise BadConfig(f"adapter {name!r} is given twice: {found[name]} and {path}")
        found[name] = str(Path(path).resolve())
    return found
