"""The `vlora` command. Imports a command's dependencies only when it runs: help and queries never load torch."""

from __future__ import annotations

import errno
import os
import sys

import click
from click.core import ParameterSource

from vlora.cli import (  # noqa: F401  (they join their commands)
    base,
    batch,
    bench,
    check,
    mcp,
    operators,
    query,
    retrieve,
    serve,
    train,
    tune,
)
from vlora.cli.group import cli
from vlora.engine.host_resources import thread_waiting
from vlora.errors import BadPlan, EngineDead, StepFailed, VLoraError
from vlora.run_folder import NotWritten

__all__ = ["cli", "main"]

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Console script entry point. Prints user errors as one line on stderr without a traceback; exit code 2 for user
    errors, 1 for other failures.
    """
    os.environ.update(thread_waiting())  # before a command imports torch
    try:
        sys.exit(cli.main(prog_name="vlora", standalone_mode=False))
    except click.Abort:
        sys.exit(130)
    except click.UsageError as error:
        hint = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
        message = error.format_message().rstrip(".")
        _fail(message[:1].lower() + message[1:] + _where(error) + hint, 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (EngineDead, NotWritten, StepFailed) as error:
        _fail(str(error), 1)
    except BadPlan as error:
        # Up to twenty errors, each with its location, one per line.
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except VLoraError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # Pending output would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader of the output closed the pipe
        if error.errno not in _NOT_WRITTEN:
            raise
        where = "" if error.filename is None else f" {str(error.filename)!r}"
        _fail(f"cannot write{where}: {error.strerror}", 1)


def _where(error: click.UsageError) -> str:
    """The source of an invalid value, unless it is the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None or not error.param.name:
        return ""
    source = error.ctx.get_parameter_source(error.param.name)
    if source is ParameterSource.ENVIRONMENT:
        names = (error.param.envvar, f"{error.ctx.auto_envvar_prefix}_{error.param.name.upper()}")
        named = next((name for name in names if isinstance(name, str) and os.environ.get(name)), names[-1])
        return f" (from the environment, {named})"
    return " (from the config file)" if source is ParameterSource.DEFAULT_MAP else ""


def _fail(message: str, code: int) -> None:
    lines = (" ".join(line.split()) for line in message.splitlines())
    print("error: " + "; ".join(filter(None, lines)), file=sys.stderr)
    sys.exit(code)
