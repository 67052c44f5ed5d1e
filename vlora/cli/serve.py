"""`vlora serve`."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from vlora.adapter_files import CONFIG_FILE
from vlora.cli.extras import require
from vlora.cli.group import cli
from vlora.cli.options import EMBEDDED, TOKEN_FILE, command, flag, log_level, model_path, settings_of
from vlora.cli.progress import waiting
from vlora.config import RULES, EngineConfig, ServedBase, ServerConfig, check_settings, setting
from vlora.errors import BadAdapter, BadConfig
from vlora.logging_format import JSON_VARIABLE, LEVEL_VARIABLE, configure
from vlora.types.composition import name_problem

if TYPE_CHECKING:
    from vlora.cluster.on_ray.settings import RayOptions

_SECONDS = {"above": 0, "most": 1e9}


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """Several engines."""

    replicas: str = setting(
        "1", "Replicas", "Number of engines, or LEAST:MOST to add and release them by load; more than one needs Ray."
    )
    scale_up_s: float = setting(
        2.0, "Replicas", "Seconds that requests wait before a replica is added by load.", **_SECONDS
    )
    scale_down_s: float = setting(
        60.0, "Replicas", "Seconds that the others could carry the load before one is released.", **_SECONDS
    )
    routing_rule: str = setting("placed", "Replicas", "Which replica gets the next request.", choices=RULES)
    routing_journal: str | None = setting(
        None, "Replicas", "Record routing in this file, up to 256 MiB, for `vlora simulate --replay`."
    )
    ray: str | None = setting(
        None,
        "Replicas",
        "Address of your Ray's head (HOST:PORT), or auto. Default: RAY_ADDRESS, else a Ray that this starts.",
    )
    ray_namespace: str = setting("vlora", "Replicas", "Ray namespace of this service.")
    ray_wait_s: float = setting(30.0, "Replicas", "Seconds that a replica may wait for room at the start.", **_SECONDS)
    replica_cpus: float = setting(
        1.0, "Replicas", "CPUs that each replica takes in Ray; with --ray, its threads.", least=0
    )
    replica_memory_gib: float = setting(0.0, "Replicas", "Memory in GiB that each replica takes in Ray.", least=0)
    replica_resource: tuple[str, ...] = setting(
        (), "Replicas", "NAME=NUMBER of a custom resource of Ray that each replica takes; may be repeated."
    )
    replica_label: tuple[str, ...] = setting(
        (), "Replicas", "NAME=VALUE of a label of Ray that a replica's node must have; may be repeated."
    )
    placement: Literal["spread", "pack"] = setting(
        "spread", "Replicas", "spread: replicas on different nodes if possible; pack: as Ray fills nodes by default."
    )
    runtime_env: str | None = setting(
        None, "Replicas", "Runtime environment of the replicas in Ray: JSON, or a YAML file."
    )
    shipped_gib: float = setting(
        20.0, "Adapters", "Limit in GiB of adapters that were uploaded, found or sent, on each machine.", above=0
    )
    shipped_adapter_gib: float = setting(4.0, "Adapters", "Limit in GiB of one such adapter.", above=0)


class Replicas(NamedTuple):
    """What the options of replicas come to. ray: None for one engine without Ray. more: of `server.launch.serve`."""

    replicas: int
    ray: RayOptions | None
    more: dict[str, Any]


def replicas_of(given: ReplicaOptions, one_engine: Mapping[str, str | None]) -> Replicas:
    """Check the options. Several replicas use the Ray of RAY_ADDRESS, if it is set, as in a job of Ray.

    Args:
        one_engine: Values of the options that several engines cannot have, by a key of `_ONE_ENGINE`.

    Raises:
        BadConfig: A number is below 1, over the limit, or none; several engines have an option for one; Ray cannot be
            used, which is not imported; or an option has no effect.
    """
    check_settings(given, _flag)
    if (numbers := re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", given.replicas)) is None:
        raise BadConfig(f"--replicas is {given.replicas!r}; write a number, or LEAST:MOST to scale by load")
    number, most = int(numbers[1]), int(numbers[2] or numbers[1])
    if not 1 <= number <= most:
        raise BadConfig(f"--replicas is {given.replicas}; at least one engine serves, and LEAST:MOST is ascending")
    address = given.ray or (os.environ.get("RAY_ADDRESS") if most > 1 else None)
    several = f"--ray {address}" if given.ray else str(most)
    for option, value in one_engine.items():
        if value is not None and (most > 1 or address):
            raise BadConfig(f"{option} {value} needs --replicas 1 (now {several}): {_ONE_ENGINE[option]}")
    from vlora.cluster.adapter_sender import ShippingLimits

    shipping = ShippingLimits(int(given.shipped_adapter_gib * 2**30), int(given.shipped_gib * 2**30))
    if most == 1 and not address:
        defaults = ReplicaOptions()
        for name in _ONLY_ON_RAY:
            if getattr(given, name) != getattr(defaults, name):
                raise BadConfig(
                    f"{_flag(name)} needs --replicas 2 or more, or --ray: one engine has no {_ONLY_ON_RAY[name]}"
                )
        return Replicas(1, None, {"shipping": shipping})
    from vlora.cluster.on_ray.settings import check_ray

    check_ray(several if given.ray else f"--replicas {given.replicas}")
    more: dict[str, Any] = {name: getattr(given, name) for name in ("scale_up_s", "scale_down_s", "routing_rule")}
    more |= {"max_replicas": most, "autoscale": most > number, "shipping": shipping}
    if given.routing_journal is not None:
        more["routing_journal"] = os.path.abspath(os.path.expanduser(given.routing_journal))
    return Replicas(number, ray_options(given, address or None), more)


_ONE_ENGINE = {  # replicas would train the same adapters in the same folder
    "--train": "one engine trains; serve it separately",
    "--learn": "one engine trains; serve it separately",
    "--serve-base": "one engine listens at an address; start `vlora base serve` as well",
}
_ONLY_ON_RAY = {
    "routing_journal": "router",
    "ray_namespace": "actors",
    "replica_cpus": "share of a node",
    "replica_memory_gib": "share of a node",
    "replica_resource": "share of a node",
    "replica_label": "node of Ray",
    "placement": "node of Ray",
    "runtime_env": "environment of Ray",
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def ray_options(given: ReplicaOptions, address: str | None) -> RayOptions:
    """Raises BadConfig."""
    from vlora.cluster.on_ray.settings import RayOptions

    if not given.ray_namespace.strip():
        raise BadConfig("--ray-namespace is empty; give the name of this service")
    resources = {}
    for name, text in _pairs("replica_resource", given.replica_resource):
        try:
            resources[name] = float(text)
        except ValueError:
            raise BadConfig(f"--replica-resource {name}={text}: {text!r} is no number") from None
        if resources[name] <= 0 or name in ("CPU", "GPU", "memory"):
            raise BadConfig(
                f"--replica-resource {name}={text}: custom resources above 0 only; see --replica-cpus, "
                "--replica-memory-gib and --tensor-parallel for others"
            )
    return RayOptions(
        address=address,
        namespace=given.ray_namespace,
        cpus=given.replica_cpus,
        memory_gib=given.replica_memory_gib,
        resources=resources,
        labels=dict(_pairs("replica_label", given.replica_label)),
        placement=given.placement,
        runtime_env={} if given.runtime_env is None else _runtime_env(given.runtime_env),
        wait_s=given.ray_wait_s,
    )


def _pairs(name: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise BadConfig(f"{_flag(name)} is {text!r}; write NAME=VALUE")
        yield key, value


def _runtime_env(text: str) -> dict[str, Any]:
    """JSON, or the path of a file with YAML, as Ray's own commands take them."""
    import yaml

    try:
        found = yaml.safe_load(text if text.lstrip().startswith("{") else Path(text).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--runtime-env {text}: the file cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"--runtime-env {text}: neither JSON nor a file with YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("env_vars", {}), dict):
        raise BadConfig(f"--runtime-env {text}: write fields of a runtime environment of Ray, as in {{'pip': [...]}}")
    return found


@command(cli, needs="serve")
def serve(
    model: str = flag(EMBEDDED, "Folder, hub name, or the model in the package.", "-m", heading="Model"),
    served_model_name: str | None = flag(
        None,
        "The base model's name in requests. Default: the folder's name, or the hub name.",
        heading="Model",
        metavar="NAME",
    ),
    adapters: tuple[str, ...] = flag(
        (), "Serve this adapter; may be repeated.", "-a", "--adapter", heading="Adapters", metavar="NAME=PATH"
    ),
    folder: Path | None = flag(None, "Serve every adapter folder in this folder.", "--adapters", heading="Adapters"),
    replica_settings: dict[str, Any] = settings_of(ReplicaOptions),
    adapter_state: str | None = flag(
        None,
        "Keep the adapters, as changed while it serves, in this folder for the next start; none: do not. Default: a "
        "folder of the port and the model.",
        heading="Adapters",
        metavar="FOLDER",
    ),
    token_file: Path | None = TOKEN_FILE,
    log_level: str = log_level("a line per request"),
    log_json: bool = flag(False, "Write the log as JSON lines.", heading="Log", envvar=JSON_VARIABLE),
    engine_settings: dict[str, Any] = settings_of(EngineConfig),
    server_settings: dict[str, Any] = settings_of(ServerConfig),
    learn: str | None = flag(
        None,
        "Plan file (YAML, see docs/training.md) of adapters that learn from corrections of their answers.",
        heading="Training",
        metavar="PLAN",
    ),
    serve_base: tuple[str, ...] = flag(
        (),
        "Serve the weights to clients of `vlora.split`, too, at HOST:PORT or unix:PATH; may be repeated.",
        heading="Training",
        metavar="ADDRESS",
    ),
) -> None:
    """Serve a model and its adapters until interrupted.

    \b
        vlora serve --adapters out/adapters
        vlora serve --model Qwen/Qwen2-VL-2B-Instruct --adapter signs=adapters/signs
        vlora serve --ray auto --replicas 2
    """
    from vlora.server.security.access import read_tokens

    os.environ |= {LEVEL_VARIABLE: log_level, JSON_VARIABLE: "1" if log_json else ""}
    configure(os.environ)
    one_engine = {"--train": engine_settings["train"], "--learn": learn, "--serve-base": next(iter(serve_base), None)}
    replicas = replicas_of(ReplicaOptions(**replica_settings), one_engine)
    named = named_adapters(adapters, folder)
    model_name = served_name(model) if served_model_name is None else served_model_name
    if not model_name.strip():
        raise BadConfig("the base model's name is empty; give a --served-model-name")
    if model_name in named:
        raise BadConfig(f"adapter {model_name!r} has the base model's name; rename it or give a --served-model-name")
    if (trainings := engine_settings["train"]) is not None:
        from vlora.training.plan import read_plan

        engine_settings["train"] = os.path.abspath(os.path.expanduser(trainings))
        read_plan(engine_settings["train"])  # an error is reported before the model loads
    learning = None
    if learn is not None:
        from vlora.learning.plan import read_learning_plan

        learning = read_learning_plan(os.path.abspath(os.path.expanduser(learn)))
    all_tokens = functools.partial(read_tokens, token_file, os.environ)
    server_config = ServerConfig(**server_settings, tokens=all_tokens())
    if server_config.camera_hosts or server_config.camera_paths:
        require("plans")
    if server_config.tracing:
        require("tracing")
    engine_config = EngineConfig(
        **engine_settings,
        model=model_path(model),
        serve_base=served_base(tuple(map(_whole, serve_base)), model_name, server_config) if serve_base else None,
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
                replicas=replicas.replicas,
                ray=replicas.ray,
                learn=learning,
                adapter_state=adapter_state,
                **replicas.more,
            )
        )
    # Skip torch's teardown, which only delays the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _whole(address: str) -> str:
    """An address with the whole path of its socket, for messages of the engine's process."""
    kind, _, path = address.partition(":")
    return f"unix:{os.path.abspath(path)}" if kind == "unix" and path else address


def served_base(addresses: tuple[str, ...], name: str, server: ServerConfig) -> ServedBase:
    """The base model for clients, with the server's tokens and certificate. Raises BadConfig."""
    from vlora.wire.address import secured

    parsed = secured(addresses, has_tokens=bool(server.tokens))  # an error is reported before the model loads
    return ServedBase(
        addresses=tuple(map(str, parsed)),
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
