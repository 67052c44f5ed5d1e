"""The `vlora` command. Imports what a command needs only when that command runs: help and queries never load torch."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.config import EngineConfig, ServerConfig
from vlora.errors import BadAdapter, BadConfig, EngineDead, StepFailed, VLoraError

if TYPE_CHECKING:
    from vlora.client import Client

EMBEDDED = "embedded"

_SETTING_HELP = {
    "load_format": "How weights are read; dummy gives random weights at the model's real shapes.",
    "device": "Device to run on: cpu or cuda.",
    "dtype": "Precision of the weights; auto takes the checkpoint's.",
    "seed": "Seed of dummy weights.",
    "policy": "Who runs next, in which mode: vlora, vlora_cost, unmerged_only, merged_only or dlora.",
    "max_batch_size": "Most requests in a step.",
    "max_step_tokens": "Most tokens in a step.",
    "max_context": "Prompt and answer together, in tokens; the model's own limit if not given.",
    "block_size": "Tokens per KV block.",
    "arena_bytes": "Memory for KV cache and adapters together; sized from free memory if not given.",
    "theta_s": "Seconds of credit after which a request starves.",
    "max_ttft_s": "Longest time to the first token of requests without a bound of their own; none if not given.",
    "weight": "NAME=WEIGHT of an adapter's fair share, * for all others; may be repeated. No shares if not given.",
    "merge_fidelity_floor": "Adapters that lose more than this when merged are never merged.",
    "switching": "How merged weights come into place: from a shadow copy, in_place (slower, no copy), or by memory.",
    "vision_cache_bytes": "Image embeddings kept for reuse.",
    "prefix_cache": "Keep KV of prompts and answers for requests that begin alike.",
    "threads": "Threads of the engine; torch's choice if not given.",
    "host": "Address to listen on; without tokens loopback only.",
    "rpyc_port": "Port to listen on; 0 takes any free one.",
    "http_port": "Port of the HTTP API; none if not given, 0 takes any free one.",
    "max_image_bytes": "Largest encoded image.",
    "max_image_pixels": "Largest decoded image.",
    "max_images": "Most images in a request.",
    "max_request_pixels": "Most pixels in a request's images together.",
    "max_message_bytes": "Largest message on the wire.",
    "max_held_bytes": "Most bytes of messages held at once, over all requests.",
    "max_prompt_chars": "Longest text in a request.",
    "max_requests": "Most requests under way at once.",
    "request_timeout_s": "Longest time a request may take.",
    "drain_s": "How long requests may still run after the server was told to stop.",
    "max_streams": "Most streams of frames open at once.",
    "stream_keep_s": "How long a stream of frames outlasts its connection.",
    "tls_cert": "Certificate chain (PEM): both surfaces then speak TLS only.",
    "tls_key": "The certificate's private key (PEM).",
    "tls_client_ca": "Callers must show a certificate of this authority (PEM), too.",
    "image_hosts": "Host that HTTP requests may name images on, * for every public one; may be repeated.",
    "image_folder": "Folder that file URLs of HTTP requests may point into.",
}


def main() -> None:
    """The console script: one line on stderr for what a user can mend, no traceback; 2 user error, 1 other failure."""
    try:
        sys.exit(cli.main(prog_name="vlora", standalone_mode=False))
    except click.Abort:
        sys.exit(130)
    except click.UsageError as error:
        hint = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
        message = error.format_message().rstrip(".")
        _fail(message[:1].lower() + message[1:] + hint, 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (EngineDead, StepFailed) as error:
        _fail(str(error), 1)
    except VLoraError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(message: str, code: int) -> None:
    lines = (" ".join(line.split()) for line in message.splitlines())
    print("error: " + "; ".join(filter(None, lines)), file=sys.stderr)
    sys.exit(code)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, invoke_without_command=True
)
@click.version_option(package_name="vlora")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve one vision-language model with many LoRA adapters.

    \b
        vlora serve --adapters out/adapters
        vlora query photo.png "What is this?"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# -- serve ------------------------------------------------------------------------------------------------------------


def _settings(config: type, *, skip: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """One flag per field of a config class (of those in `only`, if given), with the field's own default."""

    def decorate(command: Any) -> Any:
        hints = typing.get_type_hints(config)
        fields = [f for f in dataclasses.fields(config) if f.name not in skip and (not only or f.name in only)]
        for field in reversed(fields):
            flag = f"--{field.name.replace('_', '-')}"
            command = click.option(
                f"{flag}/--no-{flag[2:]}" if hints[field.name] is bool else flag,
                type=_flag_type(hints[field.name]),
                multiple=typing.get_origin(hints[field.name]) is tuple,
                default=field.default,
                show_default=field.default not in (None, ()),
                help=_SETTING_HELP.get(field.name),
            )(command)
        return command

    return decorate


def _flag_type(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


@cli.command()
@click.option("--model", default=EMBEDDED, show_default=True, help="A folder, a hub name, or the model in the package.")
@click.option("--adapter", "adapters", multiple=True, metavar="NAME=PATH", help="Serve this adapter; may be repeated.")
@click.option("--adapters", "folder", type=click.Path(path_type=Path), help="Serve every adapter folder in here.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Who may call (YAML, see docs/api.md), beside VLORA_TOKEN and VLORA_ADMIN_TOKEN.",
)
@_settings(EngineConfig, skip=("model",))
@_settings(ServerConfig, skip=("tokens",))
def serve(model: str, adapters: tuple[str, ...], folder: Path | None, token_file: Path | None, **settings: Any) -> None:
    """Serve a model and its adapters until interrupted.

    \b
        vlora serve --adapters out/adapters
        vlora serve --model Qwen/Qwen2-VL-2B-Instruct --adapter signs=adapters/signs
    """
    from vlora.server.tokens import read_tokens

    named = _named_adapters(adapters, folder)
    engine_config = _config(EngineConfig, settings, model=_model_path(model))
    server_config = _config(ServerConfig, settings, tokens=read_tokens(token_file, os.environ))
    import asyncio

    from vlora.server.supervise import serve as serve_until_stopped

    asyncio.run(serve_until_stopped(engine_config, server_config, named, announce=click.echo, model_name=model))
    # Everything has ended; taking torch apart again would only make the caller wait.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _config(kind: Any, settings: dict[str, Any], **more: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in names}, **more)


def _model_path(model: str) -> str:
    if model != EMBEDDED:
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise BadConfig(f"--model is {model!r}; there is no such folder")
        return os.path.expanduser(model)
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())


def _named_adapters(pairs: tuple[str, ...], folder: Path | None) -> dict[str, str]:
    """Name -> absolute path. Raises BadConfig for what is no pair or given twice, BadAdapter when a folder has none."""
    found: dict[str, str] = {}
    if folder is not None:
        for config in sorted(folder.glob("*/adapter_config.json")):
            found[config.parent.name] = str(config.parent.resolve())
        if not found:
            raise BadAdapter(f"{folder}: no folder with an adapter_config.json in it")
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise BadConfig(f"--adapter is {pair!r}; write NAME=PATH")
        if name in found:
            raise BadConfig(f"adapter {name!r} is given twice: {found[name]} and {path}")
        found[name] = str(Path(path).resolve())
    return found


# -- asking a server --------------------------------------------------------------------------------------------------


def _server_option(command: Any) -> Any:
    """Passes the command a `client` of the server that the flags name. The token comes from VLORA_TOKEN only: what is
    on a command line can be read by everybody on the machine."""

    @functools.wraps(command)
    def with_client(*, server: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, **args: Any) -> Any:
        return command(client=_client(server, tls_ca, tls_cert, tls_key), **args)

    for name, text in (
        ("key", "The key of --tls-cert"),
        ("cert", "Certificate to show to the server"),
        ("ca", "Authority of the server's certificate; the connection is then TLS"),
    ):
        variable = f"VLORA_TLS_{name.upper()}"
        with_client = click.option(f"--tls-{name}", envvar=variable, metavar="FILE", help=f"{text} (or {variable}).")(
            with_client
        )
    return click.option(
        "--server",
        envvar="VLORA_SERVER",
        default=f"{ServerConfig.host}:{ServerConfig.rpyc_port}",
        show_default=True,
        metavar="HOST:PORT",
        help="Where `vlora serve` listens (or VLORA_SERVER).",
    )(with_client)


def _json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")(command)


def _client(server: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> Client:
    import ssl

    from vlora.client import Client

    host, colon, port = server.rpartition(":")
    if not colon or not port.isdecimal():
        raise BadConfig(f"--server is {server!r}; write HOST:PORT")
    if tls_cert is not None and tls_ca is None:
        raise BadConfig("--tls-cert is shown over TLS only; give --tls-ca as well")
    tls: ssl.SSLContext | None = None
    try:
        if tls_ca is not None:
            tls = ssl.create_default_context(cafile=tls_ca)
            if tls_cert is not None:
                tls.load_cert_chain(tls_cert, tls_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise BadConfig(f"the files of --tls-ca, --tls-cert and --tls-key cannot be used: {error}") from error
    return Client(host.strip("[]"), int(port), token=os.environ.get("VLORA_TOKEN") or None, tls=tls)


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value))


@cli.command()
@click.argument("image", type=click.Path(path_type=Path))
@click.argument("question")
@click.option("--adapter", help="Adapter that answers; the base model if not given.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option("--stop", multiple=True, help="End the answer before this text; may be repeated.")
@click.option("--max-ttft-s", type=float, help="Longest time to the first token; no bound if not given.")
@click.option("--priority", type=int, default=0, show_default=True, help="From -10 to 10; a higher one comes first.")
@_server_option
@_json_option
def query(
    image: Path,
    question: str,
    adapter: str | None,
    max_tokens: int,
    temperature: float,
    stop: tuple[str, ...],
    max_ttft_s: float | None,
    priority: int,
    client: Client,
    as_json: bool,
) -> None:
    """Ask a question about an image.

    \b
        vlora query photo.png "What is this?" --adapter signs
    """
    with client:
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": stop,
            "max_ttft_s": max_ttft_s,
            "priority": priority,
        }
        if as_json:
            _print_json(client.generate(question, [image], adapter, **options))
            return
        for piece in client.stream(question, [image], adapter, **options):
            click.echo(piece, nl=False)
        click.echo()


@cli.command()
@click.argument("video", type=click.Path())
@click.option("--adapter", required=True, help="Adapter that has the head.")
@click.option("--head", required=True, help="Task head that answers.")
@_server_option
@_json_option
def stream(video: str, adapter: str, head: str, client: Client, as_json: bool) -> None:
    """Ask a task head about every second of a video.

    \b
        vlora stream street.mp4 --adapter traffic --head jam
    """
    from apps.video_analytics import analyse

    with client:
        for result in analyse(client, video, adapter, head):
            if as_json:
                _print_json(result)
            else:
                latency = f"{result.latency_s * 1e3:6.0f} ms"
                click.echo(f"{result.start_s:7.1f} s  {result.label:<20} {result.confidence:6.1%}  {latency}")


@cli.command()
@_server_option
@_json_option
def adapters(client: Client, as_json: bool) -> None:
    """List the adapters of a server, with their heads.

    \b
        vlora adapters --json
    """
    with client:
        found = client.adapters()
    if as_json:
        for adapter in found:
            _print_json(adapter)
        return
    if not found:
        click.echo("no adapters")
    for adapter in found:
        merge = "mergeable" if adapter.mergeable else "never merged"
        if not adapter.loaded:
            merge = f"cannot be served: {adapter.error}" if adapter.error else "read at first use"
        click.echo(f"{adapter.name}  rank {adapter.rank}  {adapter.num_bytes / 2**20:.1f} MiB  {merge}")
        for head in adapter.heads:
            frames = f"{head.num_frames} frame{'s' * (head.num_frames != 1)}"
            click.echo(f"  head {head.name}  {head.task} over {frames}: {', '.join(head.labels)}")


# -- making and measuring ---------------------------------------------------------------------------------------------


@cli.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for adapters and report.")
@click.option("--device", default=EngineConfig.device, show_default=True, help="Device to train on: cpu or cuda.")
def fuse(plan: Path, out: Path, device: str) -> None:
    """Train adapters and task heads from a fusion plan: a file, or the name of one in the package.

    \b
        vlora fuse plan.yaml --out out
        vlora fuse demo --out demo
    """
    import warnings

    import fusion

    # Third parties' notes to their own callers.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", module=r"peft\.")
    packaged = Path(fusion.__file__).parent / "plans" / f"{plan}.yaml"
    from fusion.commands import fuse as run

    run(packaged if packaged.is_file() and not plan.is_file() else plan, out, device=device)


@cli.command()
@click.option(
    "--out", default="demo", show_default=True, type=click.Path(path_type=Path), help="Folder for what it makes."
)
@click.option("--plan", default="demo", show_default=True, help="Fusion plan: a file, or one in the package by name.")
def demo(out: Path, plan: str) -> None:
    """Do the whole job once, live: fuse, serve, ask, stream. Takes some minutes.

    \b
        vlora demo
    """
    import signal

    from apps.demo import run

    # Leaving through the usual way out ends the server and the training it started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(out, plan=plan)


@cli.group()
def model() -> None:
    """The small model that ships with the package.

    \b
        vlora model eval
    """


@model.command("eval")
@click.option("--checkpoint", type=click.Path(exists=True), help="Another folder than the package's own.")
@click.option("--quick", is_flag=True, help="One seed and few pictures: a look, not a result.")
def model_eval(checkpoint: str | None, quick: bool) -> None:
    """Measure every promise of the embedded model. The last line is JSON; exit code 1 when a goal does not hold.

    \b
        vlora model eval --quick
    """
    import logging
    import warnings

    import torch
    from transformers import AutoProcessor

    from fusion.embedded import checkpoint_path
    from fusion.embedded.exam import examine
    from vlora.bench.form import Goal, Report

    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("vlora").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # what is promised holds on one core
    if checkpoint is not None:
        try:
            AutoProcessor.from_pretrained(checkpoint)
        except (OSError, ValueError) as error:
            raise BadConfig(
                f"--checkpoint {checkpoint} holds no model and processor as fusion.embedded.train writes them: {error}"
            ) from error
    seeds = (1_000_001, 1_000_002, 1_000_003)[: 1 if quick else 3]
    rows, gates = examine(
        checkpoint or checkpoint_path(),
        seeds=seeds,
        num_scenes=60 if quick else 200,
        say=lambda text: click.echo(text, err=True),
    )
    goals = [Goal(*gate) for gate in gates]
    Report("model eval", [row._asdict() for row in rows], goals, title="vlora model eval").print()
    if not all(goal.holds for goal in goals):
        sys.exit(1)


@cli.command()
@click.argument("trace")
@_settings(EngineConfig, only=("policy", "theta_s", "max_batch_size", "max_step_tokens", "max_ttft_s", "weight"))
@click.option("--adapters", type=click.IntRange(min=1), default=20, show_default=True, help="Adapters asked for.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Boxes that share the load.")
@click.option(
    "--requests", type=click.IntRange(min=1), help="How many at most: 1000 of a workload, all of a file if not given."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the workload's draws.")
@click.option(
    "--costs",
    type=click.Path(path_type=Path),
    help="The machine: JSON of `vlora bench policy --out`; one in the package if not given.",
)
@click.option(
    "--kv-tokens", type=click.IntRange(min=1), default=65_536, show_default=True, help="Room for KV in a box."
)
@click.option(
    "--resident-adapters", type=click.IntRange(min=1), default=64, show_default=True, help="Room for adapters in a box."
)
@_json_option
def simulate(
    trace: str,
    adapters: int,
    replicas: int,
    requests: int | None,
    seed: int,
    costs: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Replay traffic against the scheduler, without a model: a fake clock and a machine known by its costs.

    \b
        vlora simulate hottest:rate=0.3,skew=0.6 --policy vlora_cost
        vlora simulate gamma:rate=1,cv=2 --adapters 10000 --replicas 4 --requests 10000
        vlora simulate hottest:rate=1.3 --max-ttft-s 5 --requests 500
        vlora simulate AzureLLMInferenceTrace_conv.csv --policy unmerged_only --json

    TRACE is a CSV file with columns TIMESTAMP, ContextTokens, GeneratedTokens and perhaps Adapter, MaxTTFT and
    Priority, or a workload NAME:KEY=VALUE,...:

    \b
        hottest   rate, skew                  Poisson arrivals; the hottest adapter's share (V-LoRA 6.3.3)
        gamma     rate, cv, alpha             Gamma arrivals by adapter, power-law popularity (S-LoRA 7.2)
        punica    rate, pattern               distinct, uniform, skewed or identical popularity (Punica 7)
        video     streams, fps, chunk, frames, frame_tokens, answer     a chunk a second each (V-LoRA 6.1)

    The first three also take prompt_min, prompt_max, answer_min, answer_max, in tokens; answers of 0 ask a task head.
    """
    from vlora.simulator import commands

    found = commands.simulate(
        trace,
        num_adapters=adapters,
        num_replicas=replicas,
        num_requests=requests,
        seed=seed,
        costs=costs,
        settings=settings,
    )
    if as_json:
        _print_json(found)
    else:
        for line in commands.lines(found):
            click.echo(line)


@cli.command()
@click.argument("name")
@click.option("--quick", is_flag=True, help="Fewer repetitions: a look, not a result.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to keep reports in, with pictures."
)
def bench(name: str, quick: bool, out: Path | None) -> None:
    """Run a bench by name, or all of them. The last line is JSON; exit code 1 when a goal does not hold.

    \b
        vlora bench step --quick
    """
    from vlora.bench import main as run

    if not run(name, quick, out):
        sys.exit(1)


@cli.command()
@click.option("--model", help="Folder or hub name: search its shapes. Without it, those of the tables in the package.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["bfloat16", "float32", "float16"]),
    default=["bfloat16", "float32"],
    show_default=True,
    help="May be repeated.",
)
@click.option(
    "--minutes", type=click.FloatRange(min=0), help="Stop after this long: 5 on a CPU, 30 on a GPU if not given."
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads to measure with on a CPU."
)
@click.option("--out", type=click.Path(path_type=Path), help="The table's file; where the engine looks if not given.")
@click.option("--check", is_flag=True, help="Only verify the numerics of every row of the table.")
@click.option("--lint", is_flag=True, help="Only compile every kernel of the GPU's search space; needs no GPU.")
@click.option(
    "--build-cutlass",
    is_flag=True,
    help="Only build the grouped products that a search on a GPU may then time; needs nvcc, and no GPU.",
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    type=click.IntRange(min=80),
    help="Compute capability to build for, 80 for 8.0; may be repeated. The GPU's own, or 80 and 90, if not given.",
)
def tune(
    model: str | None,
    device: str,
    dtypes: tuple[str, ...],
    minutes: float | None,
    threads: int,
    out: Path | None,
    check: bool,
    lint: bool,
    build_cutlass: bool,
    capabilities: tuple[int, ...],
) -> None:
    """Find the fastest way to add adapters' deltas on this machine, shape by shape, and keep it in a table.

    A search that was stopped goes on where it was.

    \b
        vlora tune
        vlora tune --model Qwen/Qwen2-VL-7B-Instruct --device cuda --dtype bfloat16
    """
    if capabilities and not build_cutlass:
        raise BadConfig("--capability says what --build-cutlass builds for; give both or neither")
    if device == "cuda" and not (lint or build_cutlass):
        import torch

        if not torch.cuda.is_available():
            raise BadConfig("device 'cuda' was asked for, but torch sees no CUDA device here")
    from vlora import tune as tuning

    if build_cutlass:
        tuning.build_cutlass(capabilities or tuning.capabilities_here(), click.echo)
        sound = True
    elif lint:
        sound = tuning.lint(click.echo)
    else:
        import torch

        from atmm import tables

        torch.set_num_threads(threads)
        if check:
            sound = tuning.check(out or tables.path_for(device), device, click.echo)
        else:
            tuning.tune(
                None if model is None else _model_path(model),
                device=device,
                dtypes=dtypes,
                minutes=minutes if minutes is not None else 30.0 if device == "cuda" else 5.0,
                out=out,
            )
            sound = True
    if not sound:
        sys.exit(1)


if __name__ == "__main__":
    main()
