"""The command group, and the sources of its settings: flags, then environment, then a file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from vlora.cli.options import long_flag, write_headed
from vlora.errors import BadConfig

ENVIRONMENT = "VLORA"

_NO_OPTIONS = ("VLORA_CONFIG", "VLORA_TOKEN", "VLORA_ADMIN_TOKEN")
# Variables that Kubernetes and Docker links set for a service with a name that begins with vlora.
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$|_(NAME|ENV_\w+)$")


def _read_config(context: click.Context, option: click.Parameter, file: Path | None) -> None:
    """Make the file's values the defaults of the commands. Raises BadConfig for unknown commands and options."""
    if file is None:
        return
    import yaml

    from vlora.wording import yaml_errors

    try:
        content = yaml.load(file.read_text(), _loader()) or {}
    except OSError as error:
        raise BadConfig(f"cannot read the config file {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"the config file {str(file)!r} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"the config file {str(file)!r} is not YAML: {yaml_errors.described(error)}") from error
    assert isinstance(context.command, click.Group)
    context.default_map = _checked(content, context.command, f"the config file {str(file)!r}")


def _loader() -> Any:
    """YAML's safe one, without the numbers of base 60 of its version 1.1, in which `1:4` is 64."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_yaml_int(self, node: Any) -> Any:
            return node.value if ":" in node.value else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def _checked(content: Any, group: click.Group, where: str) -> dict[str, Any]:
    """Options by command, in click's form."""
    if not isinstance(content, dict):
        raise BadConfig(f"{where} contains no options; write 'serve: {{http-port: 8000}}', a line for each command")
    defaults: dict[str, Any] = {}
    for name, options in content.items():
        command = group.commands.get(str(name))
        if command is None:
            raise BadConfig(f"{where}: unknown command {str(name)!r}{_closest(str(name), group.commands)}")
        if isinstance(command, click.Group):
            defaults[command.name or name] = _checked(options, command, f"{where}, {name}")
            continue
        if not isinstance(options, dict):
            raise BadConfig(f"{where}, {name}: write options and their values, such as 'http-port: 8000'")
        known = {
            flag.removeprefix("--"): option
            for option in command.params
            if isinstance(option, click.Option)
            for flag in option.opts
            if flag.startswith("--")
        }
        defaults[str(name)] = {}
        for flag, value in options.items():
            option = known.get(str(flag))
            if option is None or option.name is None:
                raise BadConfig(f"{where}, {name}: unknown option {str(flag)!r}{_closest(str(flag), known)}")
            if value is None:
                continue  # treat as absent
            values = value if option.multiple and isinstance(value, list) else [value]
            if any(isinstance(each, list | dict | None) for each in values):
                form = "a value, or a list of them" if option.multiple else "one value"
                raise BadConfig(f"{where}, {name}: {flag} is {str(value)[:100]}; write {form}")
            defaults[str(name)][option.name] = values if option.multiple else value
    return defaults


def _closest(name: str, known: Any) -> str:
    match = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {match[0]!r}?" if match else ""


class Command(click.Command):
    """A command with option headings in its help, and environment variables named by its flags, not its parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unnamed = [each for each in self.params if isinstance(each, click.Option) and each.envvar is None]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        prefix = ctx.auto_envvar_prefix  # None if a command runs by itself, without its group
        for option in self._unnamed:
            flag = long_flag(option).replace("-", "_")
            option.envvar = f"{prefix}_{flag.upper()}" if prefix else None
            option.allow_from_autoenv = False
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for each in self.params:
            is_path = isinstance(each, click.Argument) or isinstance(each.type, click.Path)
            values = given.get(each.name or "")
            if is_path and "" in (values if isinstance(values, list | tuple) else [values]):  # Path("") is "."
                raise click.BadParameter("it is empty", ctx=ctx, param=each)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_headed(ctx, formatter, self.get_params(ctx))


class Group(click.Group):
    command_class = Command
    group_class = type


@click.group(
    cls=Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": ENVIRONMENT,
    },
    invoke_without_command=True,
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="YAML file of options by command (or VLORA_CONFIG).",
)
@click.version_option(package_name="vlora")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve one vision-language model with many LoRA adapters.

    \b
        vlora serve --adapters out/adapters
        vlora query photo.png "What is this?"

    The value of an option comes from its flag, else from VLORA_COMMAND_OPTION in the environment
    (VLORA_SERVE_HTTP_PORT), else from the --config file, else from its default.

    \b
    Exit codes: 0 success; 1 a failure, or a goal that is not met; 2 a user error,
    reported in one line; 130 interrupted, 143 terminated.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        return
    assert isinstance(context.command, click.Group)
    refuse_unknown(context.command, ENVIRONMENT, os.environ)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell script that completes commands and options.

    \b
        vlora completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "vlora", "_VLORA_COMPLETE").source())


def refuse_unknown(group: click.Group, prefix: str, environ: Mapping[str, str]) -> None:
    """Check that some command reads every variable with this prefix.

    Args:
        group: the group of all commands.
        prefix: prefix of the variables, without the trailing underscore.
        environ: the environment.

    Raises:
        BadConfig: names the first unknown variable and the closest known one.
    """
    known = {*_NO_OPTIONS, *_variables(group, prefix)}
    for name in sorted(environ):
        if not name.startswith(f"{prefix}_") or name in known or _is_of_a_service(name, environ[name]):
            continue
        own = {each.removeprefix(f"{prefix}_"): each for each in known}
        match = difflib.get_close_matches(name.removeprefix(f"{prefix}_"), own, 1)
        hint = f"did you mean {own[match[0]]}?" if match else "unset it"
        raise BadConfig(f"no command reads the environment variable {name}; {hint}")


def _variables(group: click.Group, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        own = f"{prefix}_{name.upper().replace('-', '_')}"
        if isinstance(command, click.Group):
            yield from _variables(command, own)
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            given = option.envvar
            yield from [given] if isinstance(given, str) else given or ()
            yield f"{own}_{long_flag(option).replace('-', '_').upper()}"


def _is_of_a_service(name: str, value: str) -> bool:
    found = _OF_SERVICES.search(name)
    # A misspelt option may also end in _PORT; the service variables contain an address.
    return found is not None and (not name.endswith("_PORT") or "://" in value or name.endswith("_SERVICE_PORT"))
