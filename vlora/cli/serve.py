"""`vlora serve`."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.adapter_files import CONFIG_FILE
from vlora.cli.cluster import read_cluster
from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.options import headed
from vlora.cli.progress import waiting
from vlora.cli.settings import EMBEDDED, config_flags, make_config, model_path
from vlora.config import EngineConfig, ServedBase, ServerConfig
from vlora.errors import BadAdapter, BadConfig
from vlora.logging_format import JSON_VARIABLE, LEVEL_VARIABLE, LEVELS, configure
from vlora.types.composition import name_problem

if TYPE_CHECKING:
    from vlora.cluster.nodes.plan import ClusterPlan

_MOST_SECONDS = 1e9


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """Several engines; a flag each."""

    replicas: int = 1
    max_replicas: int | None = None
    autoscale: bool = False
    scale_up_s: float = 2.0
    scale_down_s: float = 60.0
    routing_rule: str = "placed"
    routing_journal: str | None = None
    ship_adapters: bool = False


def take_replica_options(
    settings: dict[str, Any],
    cluster: ClusterPlan | None = None,
    *,
    learn: str | None = None,
    serve_base: Sequence[str] = (),
) -> ReplicaOptions:
    """Remove the values of these options from all settings of the command, and return them, checked.

    Args:
        settings: By name.
        cluster: The plan of several machines, which has the number of replicas.
        learn: Plan of learning adapters, which are trained.
        serve_base: Addresses at which the engine serves its weights.

    Raises:
        BadConfig: A number is below 1, over the limit, or none; several engines have a plan of trainings, as replicas
            would train the same adapters in the same folder, or one address for their weights; Ray cannot be used,
            which is not imported; or an option has no effect.
    """
    given = ReplicaOptions(**{field.name: settings.pop(field.name) for field in dataclasses.fields(ReplicaOptions)})
    number, most = given.replicas, given.max_replicas
    if number < 1:
        raise BadConfig(f"--replicas is {number}; at least one engine serves")
    if most is not None and most < number:
        raise BadConfig(f"--max-replicas is {most}, below --replicas {number}; set it to {number} or more")
    most = most or number
    for name in ("scale_up_s", "scale_down_s"):
        if not 0 < getattr(given, name) <= _MOST_SECONDS:
            raise BadConfig(f"--{name.replace('_', '-')} is {getattr(given, name):g}; set seconds from above 0 to 1e9")
    if cluster is not None:
        if given.autoscale and cluster.replicas.limit == cluster.replicas.number:
            raise BadConfig("--autoscale needs `replicas.most` of the plan above `replicas.number`")
    elif given.autoscale and most == number:
        raise BadConfig(f"--autoscale needs a --max-replicas above --replicas {number}")
    for option, plan in (("--train", settings.get("train")), ("--learn", learn)):
        if plan is not None and (most > 1 or cluster is not None):
            now = "--cluster" if cluster is not None else most
            raise BadConfig(f"{option} {plan} needs --replicas 1 (now {now}): one engine trains; serve it separately")
    if serve_base and (most > 1 or cluster is not None):
        now = "--cluster" if cluster is not None else most
        raise BadConfig(
            f"--serve-base {serve_base[0]} needs --replicas 1 (now {now}): one engine listens at an address; start "
            "`vlora base serve` as well"
        )
    if given.ship_adapters and cluster is None:
        raise BadConfig("--ship-adapters needs --cluster: replicas of one machine read the same files")
    if given.routing_journal is not None:
        if most == 1 and cluster is None:
            raise BadConfig("--routing-journal needs --replicas 2 or more: one engine has no router")
        path = os.path.abspath(os.path.expanduser(given.routing_journal))
        given = dataclasses.replace(given, routing_journal=path)
    if most > 1:
        from vlora.cluster.on_ray.settings import check_ray

        check_ray(f"--replicas {most}")
    return given


@cli.command()
@headed(
    "Model", "-m", "--model", default=EMBEDDED, show_default=True, help="Folder, hub name, or the model in the package."
)
@headed(
    "Model",
    "--served-model-name",
    metavar="NAME",
    help="The base model's name in requests. Default: the folder's name, or the hub name.",
)
@headed(
    "Adapters",
    "-a",
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="Serve this adapter; may be repeated.",
)
@headed(
    "Adapters",
    "--adapters",
    "folder",
    type=click.Path(path_type=Path),
    help="Serve every adapter folder in this folder.",
)
@config_flags(ReplicaOptions)
@headed(
    "Replicas",
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    help="Plan of several machines (YAML, see docs/cluster.md), with model, adapters and replicas.",
)
@headed(
    "Adapters",
    "--adapter-state",
    metavar="FOLDER",
    help="Keep the adapters, as changed while it serves, in this folder for the next start; none: do not. Default: "
    "a folder of the port and the model.",
)
@headed(
    "Network",
    "--token-file",
    type=click.Path(path_type=Path),
    help="Token file (YAML, see docs/api.md), in addition to VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
)
@headed(
    "Log",
    "--log-level",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    envvar=LEVEL_VARIABLE,
    help="Level of the log on stderr; info writes a line per request.",
)
@headed("Log", "--log-json", is_flag=True, envvar=JSON_VARIABLE, help="Write the log as JSON lines.")
@config_flags(EngineConfig, skip=("model", "serve_base"))
@config_flags(ServerConfig, skip=("tokens",))
@headed(
    "Training",
    "--learn",
    metavar="PLAN",
    help="Plan file (YAML, see docs/training.md) of adapters that learn from corrections of their answers.",
)
@headed(
    "Training",
    "--serve-base",
    multiple=True,
    metavar="ADDRESS",
    help="Serve the weights to clients of `vlora.split`, too, at HOST:PORT or unix:PATH; may be repeated.",
)
@needs("serve")
def serve(
    model: str,
    served_model_name: str | None,
    adapters: tuple[str, ...],
    folder: Path | None,
    cluster_file: Path | None,
    learn: str | None,
    serve_base: tuple[str, ...],
    adapter_state: str | None,
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
    from vlora.server.security.access import read_tokens

    os.environ |= {LEVEL_VARIABLE: log_level, JSON_VARIABLE: "1" if log_json else ""}
    configure(os.environ)
    plan: ClusterPlan | None = None
    if cluster_file is None:
        replicas = take_replica_options(settings, learn=learn, serve_base=serve_base)
        named = named_adapters(adapters, folder)
    else:
        plan, model, named = read_cluster(cluster_file)
        replicas = take_replica_options(settings, plan, learn=learn, serve_base=serve_base)
    model_name = served_name(model) if served_model_name is None else served_model_name
    if not model_name.strip():
        raise BadConfig("the base model's name is empty; give a --served-model-name")
    if model_name in named:
        raise BadConfig(f"adapter {model_name!r} has the base model's name; rename it or give a --served-model-name")
    if (trainings := settings.get("train")) is not None:
        from vlora.training.plan import read_plan

        settings["train"] = os.path.abspath(os.path.expanduser(trainings))
        read_plan(settings["train"])  # an error is reported before the model loads
    learning = None
    if learn is not None:
        from vlora.learning.plan import read_learning_plan

        learning = read_learning_plan(os.path.abspath(os.path.expanduser(learn)))
    all_tokens = functools.partial(read_tokens, token_file, os.environ)
    server_config = make_config(ServerConfig, settings, tokens=all_tokens())
    engine_config = make_config(
        EngineConfig,
        settings,
        model=model_path(model),
        serve_base=_served_base(serve_base, model_name, server_config) if serve_base else None,
    )
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
                cluster=plan,
                learn=learning,
                adapter_state=adapter_state,
                **dataclasses.asdict(replicas),
            )
        )
    # Skip torch's teardown, which only delays the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _served_base(addresses: tuple[str, ...], name: str, server: ServerConfig) -> ServedBase:
    """The base model for clients, with the server's tokens and certificate. Raises BadConfig."""
    from vlora.split.addresses import secured

    parsed = secured(addresses, has_tokens=bool(server.tokens))  # an error is reported before the model loads
    return ServedBase(
        # The engine's process has the same working directory; messages have the whole path.
        addresses=tuple(f"unix:{os.path.abspath(each.path)}" if each.path else str(each) for each in parsed),
        name=name,
        tokens=server.tokens,
        tls_cert=server.tls_cert,
        tls_key=server.tls_key,
        tls_client_ca=server.tls_client_ca,
    )


def served_name(model: str) -> str:
    """A folder's base name (its location is not exposed to clients), or a hub name unchanged."""
    folder = Path(model).expanduser()
    return folder.resolve().name if model != EMBEDDED and folder.is_dir() else model


def named_adapters(pairs: tuple[str, ...], folder: Path | None) -> dict[str, str]:
    """Name -> absolute path. Raises BadConfig for malformed or duplicate pairs, BadAdapter for a folder without
    adapters or a name that none may have.
    """
    found: dict[str, str] = {}
    if folder is not None:
        # Not resolved: a volume of Kubernetes replaces the folder behind a link, and its hidden folders hold the same.
        configs = sorted(folder.glob(f"[!.]*/{CONFIG_FILE}"))
        found = {config.parent.name: os.path.abspath(config.parent) for config in configs}
        if not found:
            itself = (
                f"; it is an adapter itself: use --adapter NAME={folder}" if (folder / CONFIG_FILE).is_file() else ""
            )
            raise BadAdapter(f"{folder}: contains no folder with an {CONFIG_FILE}{itself}")
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise BadConfig(f"--adapter is {pair!r}; write NAME=PATH")
        if name in found:
            raise BadConfig(f"adapter {name!r} is given twice: {found[name]} and {path}")
        found[name] = os.path.abspath(path)
    for problem in filter(None, map(name_problem, found)):
        raise BadAdapter(problem)
    return found
