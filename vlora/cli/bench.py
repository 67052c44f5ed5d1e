"""Measurement commands: `simulate`, `bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.options import RULES, json_option, print_json
from vlora.cli.progress import waiting
from vlora.cli.settings import config_flags
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.run_folder import writing

_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)
_ABOVE_0 = click.FloatRange(min=0, min_open=True)

# Name in `ClusterConfig`, type, default, help.
_CLUSTER_SETTINGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("replicas", _COUNT, 1, "Number of replicas that share the load."),
    ("rule", click.Choice(RULES), "placed", "Which replica gets the next request."),
    (
        "over",
        click.FloatRange(min=1),
        None,
        "Requests that a replica takes at a time, in batches; others wait in the router. Default: 1.5; 1 under punica; "
        "no limit under least_loaded and round_robin.",
    ),
    ("max_replicas", _COUNT, None, "Add replicas up to this number, and release them, by the load."),
    ("start_s", _SECONDS, 15.0, "Seconds until an added replica serves."),
    ("mtbf_s", _SECONDS, 0.0, "Mean seconds between failures of a replica; 0: none fail."),
    ("detect_s", _SECONDS, 0.0, "Seconds from a failure until the router learns of it."),
    ("restart_s", _SECONDS, 15.0, "Seconds from then until a replacement serves."),
    ("report_s", _SECONDS, 0.0, "Period of the replicas' reports to the router; 0: at every event."),
    ("report_age_s", _SECONDS, 0.0, "A report arrives up to so many seconds after it was made."),
    ("rebalance_s", _SECONDS, 0.0, "Period of moving requests to replicas that finish early; 0: never."),
)


def cluster_options(command: Any) -> Any:
    command = click.option(
        "--quick/--full",
        default=None,
        help="Simulate stretches of unmerged steps, or each step. Default: --quick with more than 16 replicas.",
    )(command)
    for name, kind, default, text in reversed(_CLUSTER_SETTINGS):
        flag = f"--{name.replace('_', '-')}"
        shown = default is not None
        command = click.option(flag, type=kind, default=default, show_default=shown, help=text)(command)
    return command


def take_cluster_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of these options, except --quick, from all settings of the command, and return them."""
    return {name: settings.pop(name) for name, *_ in _CLUSTER_SETTINGS}


OPTION_NAMES = {"surfaces": "surface", "cases": "case", "adapter_names": "adapter-name"}
"""Options that may be repeated, by the parameter that receives all their values."""

_SERVE_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("requests", _COUNT, "number of requests; default 8"),
    ("duration_s", _ABOVE_0, "send requests for this many seconds instead of a fixed number"),
    ("concurrency", _COUNT, "outstanding requests at any time; default 8"),
    ("rate", _ABOVE_0, "requests per second with Poisson arrivals (open loop)"),
    ("trace", str, "arrivals and lengths of a CSV file or workload of `vlora simulate`, as hottest:rate=1,skew=0.8"),
    ("adapters", _COUNT, "number of adapters; default 4"),
    ("popularity", click.Choice(["uniform", "zipf", "hottest"]), "how requests choose adapters; default uniform"),
    ("skew", click.FloatRange(0, 1, min_open=True), "the hottest adapter's share; default 0.6"),
    ("prompt_tokens", _COUNT, "tokens per prompt with its pictures; default 256"),
    ("answer_tokens", _COUNT, "tokens per answer; default 32"),
    ("pictures", click.IntRange(min=0), "pictures per request; default 1"),
    ("picture_width", _COUNT, "pixels; default 224"),
    ("picture_height", _COUNT, "pixels; default 224"),
    ("rounds", _COUNT, "repetitions of server and baselines in turn; default 3"),
    ("dtype", click.Choice(["bfloat16", "float32"]), "dtype of the server; default bfloat16"),
    (
        "url",
        str,
        "measure this server instead: URL of its OpenAI API with the path; OPENAI_API_KEY is its token",
    ),
)
_REPEATED: tuple[tuple[str, Any, str], ...] = (
    ("surfaces", click.Choice(["http", "rpyc"]), "default http"),
    ("threads", _COUNT, "default: the server's default, then 1"),
    (
        "cases",
        click.Choice(["one", "base", "adapters"]),
        "one request, many of the base model, many of adapters; default all",
    ),
    ("adapter_names", str, "name of an adapter at --url"),
)


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `serve`. Each is None, or empty, unless given: the bench holds the defaults."""
    for name, kind, text in reversed(_REPEATED):
        flag = f"--{OPTION_NAMES.get(name, name)}"
        command = click.option(flag, name, type=kind, multiple=True, help=f"Of `serve`: {text}; may be repeated.")(
            command
        )
    for name, kind, text in reversed(_SERVE_OPTIONS):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=f"Of `serve`: {text}.")(command)
    return command


@cli.command()
@click.argument("trace", required=False)
@click.option(
    "--replay",
    "journal",
    type=click.Path(exists=True, dir_okay=False),
    help="Repeat the routing of a file of `vlora serve --routing-journal` instead, and compare the decisions.",
)
@config_flags(
    EngineConfig,
    only=("policy", "theta_s", "max_batch_size", "max_step_tokens", "max_ttft_s", "weight", "tenant_weight"),
)
@click.option("--adapters", type=click.IntRange(min=1), default=20, show_default=True, help="Number of adapters.")
@click.option(
    "--tenants",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tenants that share the requests without a tenant, by a power law: tenant-0 sends most.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="Maximum number of requests. Default: 1000 of a workload, all of a file.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the workload.")
@click.option(
    "--costs",
    type=click.Path(path_type=Path),
    help="Machine costs: JSON of `vlora bench costs --out`. Default: the file in the package.",
)
@cluster_options
@json_option
def simulate(
    trace: str | None,
    journal: str | None,
    adapters: int,
    tenants: int,
    requests: int | None,
    seed: int,
    costs: Path | None,
    quick: bool | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Replay traffic against the scheduler without a model, with a simulated clock and a machine's measured costs.

    \b
        vlora simulate hottest:rate=0.3,skew=0.6 --policy algorithm1
        vlora simulate gamma:rate=1,cv=2 --adapters 10000 --replicas 4 --requests 10000
        vlora simulate gamma:rate=1000 --replicas 1000 --rule placed --mtbf-s 3600 --requests 100000
        vlora simulate hottest:rate=1.3 --max-ttft-s 5 --requests 500
        vlora simulate hottest:rate=3 --tenants 2 --tenant-weight tenant-1=3 --requests 300
        vlora simulate AzureLLMInferenceTrace_conv.csv --policy unmerged_only --json
        vlora simulate --replay routing.jsonl

    TRACE is a CSV file with columns TIMESTAMP, ContextTokens, GeneratedTokens and optionally Adapter, MaxTTFT, Priority
    and Tenant, or a workload NAME:KEY=VALUE,...:

    \b
        hottest   rate, skew                  Poisson arrivals; the hottest adapter's share (V-LoRA 6.3.3)
        gamma     rate, cv, alpha             Gamma arrivals by adapter, power-law popularity (S-LoRA 7.2)
        punica    rate, pattern               distinct, uniform, skewed or identical popularity (Punica 7)
        video     streams, fps, chunk, frames, frame_tokens, answer     a chunk a second each (V-LoRA 6.1)

    The first three also take prompt_min, prompt_max, answer_min, answer_max, in tokens; an answer length of 0 selects a
    task head. With prefixes=N each prompt begins with one of N common prefixes of prefix_tokens tokens.

    Of more than 16 replicas, stretches of equal steps are simulated, not each step: 30 to 60 times faster, with
    unmerged steps only. --quick and --full choose one way.
    """
    from vlora.simulator import commands

    if journal is not None:
        _replay(trace, journal, as_json=as_json)
        return
    if trace is None:
        raise BadConfig("vlora simulate needs a TRACE, a CSV file or a workload, or --replay FILE")
    cluster = take_cluster_settings(settings)
    policy = settings.pop("policy")
    if click.get_current_context().get_parameter_source("policy") is ParameterSource.DEFAULT:
        policy = None
    with waiting("replaying"):
        found = commands.simulate(
            trace,
            num_adapters=adapters,
            num_requests=requests,
            num_tenants=tenants,
            seed=seed,
            costs=costs,
            quick=quick,
            policy=policy,
            settings={name: value for name, value in settings.items() if value is not None},
            cluster=cluster,
        )
    if as_json:
        print_json(found)
    else:
        for line in commands.lines(found):
            click.echo(line)


def _replay(trace: str | None, journal: str, *, as_json: bool) -> None:
    """Repeat recorded routing. A difference is an exit with code 1."""
    from vlora.simulator.commands import repeat

    if trace is not None:
        raise BadConfig(f"--replay repeats {journal}; leave the TRACE {trace!r} out")
    with waiting("replaying"):
        found = repeat(journal)
    if as_json:
        print_json(found._asdict())
    elif found.difference is None:
        click.echo(f"{found.num_calls} calls of the router, each with the recorded result")
    else:
        name, recorded, present = found.difference
        click.echo(f"call {found.num_calls + 1}, {name}, differs: recorded {recorded}, now {present}")
    if found.difference is not None:
        sys.exit(1)


_OF: dict[str, tuple[str, ...]] = {
    "latencies_us": ("tp",),
    "figures": ("paper",),
    "model": ("costs", "serve"),
    "device": ("costs",),
    "quantize": ("step",),
}
"""Benchmarks that take an option; all others are of `serve`."""

_FLAGS = {"latencies_us": "latency-us", "figures": "figure", **OPTION_NAMES}


@cli.command()
@click.argument("name")
@click.option("--quick", is_flag=True, help="Fewer repetitions; figures are rough.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for reports and plots.")
@click.option(
    "--latency-us",
    "latencies_us",
    multiple=True,
    type=click.IntRange(min=0),
    help="Of `tp`: microseconds added to each collective; may be repeated.",
)
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="PAPER:NUMBER",
    help="Of `paper`: only this figure, such as v-lora:fig14 or s-lora:table3; may be repeated.",
)
@click.option(
    "--model",
    help="Of `costs`: qwen2-0.5b (default), qwen2-vl-7b or llava-13b. Of `serve`: the base model's name at --url.",
)
@click.option("--device", help="Of `costs`: cpu (default) or cuda.")
@click.option(
    "--quantize",
    type=click.Choice(["fp8", "int8", "int4"]),
    help="Of `step`: compare weights in this format with bfloat16.",
)
@serve_options
@json_option
@needs("fuse")
def bench(name: str, quick: bool, out: Path | None, as_json: bool, **options: Any) -> None:
    """Run a benchmark by name, or all of them. The last line of each is JSON; with --json it is the only line. The exit
    code is 1 if a goal is not met.

    \b
        vlora bench step --quick
        vlora bench step --quantize int8
        vlora bench tp --latency-us 0 --latency-us 500
        vlora bench costs --out results      # results/costs.json is this machine for vlora simulate --costs
        vlora bench serve --surface http --surface rpyc --concurrency 16 --requests 64 --popularity zipf
        vlora bench serve --url http://127.0.0.1:8000/v1 --model base --adapter-name signs --rate 2 --duration-s 60
        vlora bench streams --out results    # cameras in real time; some ten minutes
        vlora bench fusion --out results     # with --out, an interrupted run continues
        vlora bench paper --out figures      # the papers' figures beside ours; resumes
        vlora bench paper --out figures --figure v-lora:fig14 --quick

    `step`, `costs`, `serve` and `tp` are installed; a checkout has all others. `fusion` and `retrieve` (recall of
    `vlora retrieve`) train models: they take long, and run last in `all`. `paper` is not part of `all`.
    """
    given = {option: value for option, value in options.items() if value not in (None, ())}
    for option in given:
        of = _OF.get(option, ("serve",))
        if name not in of:
            flag, names = _FLAGS.get(option, option.replace("_", "-")), " and ".join(f"`{each}`" for each in of)
            raise BadConfig(f"--{flag} is valid for `vlora bench {names[1:]} only, not for {name!r}; remove it")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # before a bench of minutes or hours
        except OSError as error:
            raise BadConfig(f"--out: the folder {str(out)!r} cannot be created: {error.strerror}") from error
    from vlora.bench import harness

    hint = "" if out is None else f"finished measurements are in {out}; the same command continues"
    with waiting(f"bench {name}"), ends_with(lambda: hint), writing(out or ".", only_disks=True):
        holds = harness.run(name, quick, out, only_json=as_json, **given)
    if not holds:
        sys.exit(1)
