"""Commands and their options: flags from parameters and from configurations, the server, and what commands print."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from vlora.cli.extras import require
from vlora.config import ServerConfig, choices_of, setting, types_of
from vlora.errors import BadConfig, BadRequest
from vlora.logging_format import LEVEL_VARIABLE, LEVELS

if TYPE_CHECKING:
    from vlora.client import Client

EMBEDDED = "embedded"

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
_OWN = "Options"  # heading of options that have no other

# -- flags of parameters ----------------------------------------------------------------------------------------------


class HeadedOption(click.Option):
    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class _Group(NamedTuple):
    """The settings of a configuration that a command has; all if `only` is empty."""

    config: type
    only: tuple[str, ...]


def flag(default: Any, text: str, *names: str, heading: str = _OWN, **more: Any) -> Any:
    """An option, as the default of a command's parameter or of a dataclass's field; its type is the annotation's.

    Args:
        default: Of the option.
        text: The help.
        names: Flags, if they are not `--` and the parameter's name.
        more: Bounds and choices as of `setting`; others are click's.
    """
    return setting(default, heading, text, names=names, **more)


def settings_of(config: type, *only: str) -> Any:
    """Options for the settings of a configuration, as the default of a parameter that receives their values by name."""
    return _Group(config, only)


def command(
    group: click.Group,
    name: str | None = None,
    *,
    needs: str | None = None,
    params: Sequence[click.Parameter] = (),
    **attributes: Any,
) -> Any:
    """A decorator that adds a command to a group, with options for the parameters that have a flag as default.

    The parameter `client` receives a client of the server that further options name. `as_json` is the flag --json.

    Args:
        needs: The extra without whose packages the command raises BadConfig before it does anything.
        params: Further ones, before the others.
        attributes: As of `click.Group.command`.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, localns={"Client": object})
        groups = {each: set[str]() for each, its in parameters.items() if isinstance(its.default, _Group)}
        options = [*params]
        for each, its in parameters.items():
            if each == "client":
                options += [_option(flag, str, field) for flag, field in _SERVER.items()]
            elif each == "as_json":
                options.append(_option(each, bool, _JSON))
            elif isinstance(its.default, _Group):
                config, only = its.default
                fields = [field for field in dataclasses.fields(config) if "heading" in field.metadata]
                fields = [field for field in fields if not only or field.name in only]
                groups[each] = {field.name for field in fields}
                options += [_option(field.name, types_of(config)[field.name], field) for field in fields]
            elif isinstance(its.default, dataclasses.Field):
                options.append(_option(each, hints[each], its.default))

        @functools.wraps(function)
        def run(**values: Any) -> None:
            if needs is not None:
                require(needs)
            for parameter, names in groups.items():
                values[parameter] = {name: values.pop(name) for name in names}
            if "client" in parameters:
                values["client"] = client_of(*(values.pop(name) for name in _SERVER))
            function(**values)

        made: click.Command = group.command(name, params=options, **attributes)(run)
        return made

    return decorate


def _option(name: str, hint: Any, field: dataclasses.Field[Any]) -> HeadedOption:
    more = dict(field.metadata)
    names: tuple[str, ...] | None = more.pop("names", None)  # None: of a configuration, which checks its bounds itself
    bounds = {bound: more.pop(bound) for bound in ("least", "above", "most") if bound in more}
    if type(None) in typing.get_args(hint):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if multiple := typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    kind = more.pop("type", click.Path(path_type=Path) if hint is Path else hint)
    if choices := choices_of(hint, more):
        kind = click.Choice(choices)
    elif bounds and names is not None:
        least, most = bounds.get("least", bounds.get("above")), bounds.get("most")
        kind = (click.IntRange if hint is int else click.FloatRange)(least, most, min_open="above" in bounds)
    more.pop("choices", None)
    flags = [*(names or ()), *filter(None, [more.pop("short", None)])]
    if not any(each.startswith("--") for each in flags):
        flags.append(f"--{name.replace('_', '-')}")
    if both := hint is bool and names is None:
        flags[-1] += f"/--no-{flags[-1][2:]}"
    if not more.get("required"):
        more["default"] = field.default  # click takes None for a value, which satisfies a required option
    return HeadedOption(
        [name, *flags],
        heading=more.pop("heading"),
        help=more.pop("text"),
        type=kind,
        is_flag=hint is bool,
        multiple=multiple,
        show_default=both or not (field.default in (None, ()) or field.default is False),
        **more,
    )


def given(name: str) -> bool:
    """Whether an option of the running command is on its command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def long_flag(option: click.Option) -> str:
    """The flag without its dashes, "max-tokens": its name in config files, and in the environment in capitals."""
    return next(flag for flag in option.opts if flag.startswith("--")).removeprefix("--")


def write_headed(context: click.Context, formatter: click.HelpFormatter, params: list[click.Parameter]) -> None:
    """Write options by heading, in order of each heading's first option; those without one come last, as "Options"."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(context)
        if record is not None:
            rows.setdefault(param.heading if isinstance(param, HeadedOption) else _OWN, []).append(record)
    for heading in sorted(rows, key=_OWN.__eq__):
        with formatter.section(heading):
            formatter.write_dl(rows[heading])


def check_given_once(flags: Mapping[str, Sequence[str]]) -> None:
    """Check the values of flags by name. Raises BadRequest for one that is given more than once."""
    for flag, values in flags.items():
        if repeated := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise BadRequest(f"{flag} {repeated[0]!r} is given more than once; give it once")


# -- flags of several commands ----------------------------------------------------------------------------------------


_JSON = flag(False, "Print JSON, one object per line.", "--json")
# The token comes from VLORA_TOKEN only: every user of the machine can read a command line.
_SERVER = {
    "server": flag(
        f"{ServerConfig.host}:{ServerConfig.rpyc_port}",
        "Address of `vlora serve`, or several with commas (or VLORA_SERVER).",
        "-s",
        envvar="VLORA_SERVER",
        metavar="HOST:PORT",
    )
}
for _name, _text in (
    ("ca", "CA of the server's certificate; enables TLS"),
    ("cert", "Client certificate to present to the server"),
    ("key", "Private key of --tls-cert"),
):
    _variable = f"VLORA_TLS_{_name.upper()}"
    _SERVER[f"tls_{_name}"] = flag(None, f"{_text} (or {_variable}).", envvar=_variable, metavar="FILE")

WAIT = flag(0.0, "How long to wait at startup for a server that is not ready yet.", least=0)
ADAPTER = flag(None, "Adapter or domain to ask, or several adapters: a+b, 0.7*a+0.3*b. Default: the base model.", "-a")
HEAD = flag(None, "Task head of the adapter to use, with its own question.")
ANSWER = flag(None, "Way to answer a domain's question. Default: the one that was more accurate on validation data.")
ANSWER_TOKENS = flag(128, "Maximum number of answer tokens.")
TOKEN_FILE = flag(
    None,
    "Token file (YAML, see docs/api.md), in addition to VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
    heading="Network",
)


def log_level(info: str) -> Any:
    """info: what the level info writes."""
    text = f"Level of the log on stderr; info writes {info}."
    return flag("warning", text, heading="Log", choices=LEVELS, envvar=LEVEL_VARIABLE)


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


def model_path(model: str, name: str = "--model") -> str:
    """The folder of a model, or its hub name unchanged. Raises BadConfig for a folder that does not exist."""
    if model != EMBEDDED:
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise BadConfig(f"{name} is {model!r}; there is no such folder")
        return os.path.expanduser(model)
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())


def say(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


def print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value))
