"""Measurement commands: `simulate`, `bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from vlora.cli.bench_retrieve import bench_retrieve
from vlora.cli.bench_serve import OPTION_NAMES, serve_options
from vlora.cli.cluster_options import cluster_options, take_cluster_settings
from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.progress import waiting
from vlora.cli.server_flags import json_option, print_json
from vlora.cli.settings import config_flags
from vlora.config import EngineConfig
from vlora.errors import BadConfig

_ELSEWHERE = ("paper", "fusion", "bd", "activated", "retrieve")  # benches that are not of `vlora.bench`


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
@click.option(
    "--kv-tokens",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="KV capacity per replica, in tokens.",
)
@click.option(
    "--resident-adapters",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Adapter capacity per replica.",
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
            settings=settings,
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
@click.option("--seeds", type=click.IntRange(min=1), help="Of `bd`: number of seeds. Default: 3.")
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="PAPER:NUMBER",
    help="Of `paper`: only this figure, such as v-lora:fig14 or s-lora:table3; may be repeated.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["memory", "peaks", "speed", "table5", "mixed", "engine"]),
    help="Of `split`: only this part; may be repeated.",
)
@click.option(
    "--model",
    help="Of `policy` and `costs`: qwen2-0.5b (default), qwen2-vl-7b or llava-13b. Of `serve`: the base model's "
    "name at --url.",
)
@click.option("--device", help="Of `policy` and `costs`: cpu (default) or cuda.")
@click.option(
    "--quantize",
    type=click.Choice(["fp8", "int8", "int4"]),
    help="Of `step`: compare weights in this format with bfloat16.",
)
@serve_options
@json_option
@needs("fuse")
def bench(
    name: str,
    quick: bool,
    out: Path | None,
    latencies_us: tuple[int, ...],
    seeds: int | None,
    figures: tuple[str, ...],
    parts: tuple[str, ...],
    model: str | None,
    device: str | None,
    quantize: str | None,
    as_json: bool,
    **serve: Any,
) -> None:
    """Run a bench by name, or all of them. The last line of each is JSON; with --json it is the only line. Exit code 1
    if a goal is not met.

    \b
        vlora bench step --quick
        vlora bench step --quantize int8
        vlora bench tp --latency-us 0 --latency-us 500
        vlora bench costs --out results      # results/costs.json is this machine for vlora simulate --costs
        vlora bench policy --model qwen2-vl-7b --device cuda
        vlora bench serve --surface http --surface rpyc --concurrency 16 --requests 64 --popularity zipf
        vlora bench serve --url http://127.0.0.1:8000/v1 --model base --adapter-name signs --rate 2 --duration-s 60
        vlora bench split --part mixed --out results
        vlora bench streams --out results    # cameras in real time; some ten minutes
        vlora bench fusion --out results     # resumes an interrupted run, as do policy, split and teachers
        vlora bench paper --out figures      # the papers' figures beside ours; resumes
        vlora bench paper --out figures --figure v-lora:fig14 --quick

    `teachers` (small models beside adapters), `fusion`, `bd` (block-diagonal adapters), `activated` (aLoRA) and
    `retrieve` (recall of `vlora retrieve`) train models: they take long, and run last in `all`. `paper` is not part of
    `all`.
    """
    given = {name: value for name, value in serve.items() if value not in (None, ())}
    if given and name != "serve":
        flags = ", ".join(f"--{OPTION_NAMES.get(each, each.replace('_', '-'))}" for each in given)
        raise BadConfig(f"{flags}: valid for `vlora bench serve` only, not for {name!r}; remove them")
    if latencies_us and name != "tp":
        raise BadConfig(f"--latency-us is valid for `vlora bench tp` only, not for {name!r}; remove it")
    if seeds is not None and (name != "bd" or quick):
        raise BadConfig("--seeds is valid for `vlora bench bd` without --quick only (--quick uses one seed); remove it")
    on: dict[str, Any] = {key: value for key, value in (("model", model), ("device", device)) if value is not None}
    if on and name not in ("policy", "costs") and not (name == "serve" and device is None):
        raise BadConfig(
            f"--model and --device are valid for `vlora bench policy` and `costs` only, not for {name!r}; remove them"
        )
    if quantize is not None and name != "step":
        raise BadConfig(f"--quantize is valid for `vlora bench step` only, not for {name!r}; remove it")
    if parts and name != "split":
        raise BadConfig(f"--part is valid for `vlora bench split` only, not for {name!r}; remove it")
    if figures and name != "paper":
        raise BadConfig(f"--figure is valid for `vlora bench paper` only, not for {name!r}; remove it")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # before a bench of minutes or hours
        except OSError as error:
            raise BadConfig(f"--out: the folder {str(out)!r} cannot be created: {error.strerror}") from error
    if name == "paper":
        holds = _bench_paper(quick, out, figures, as_json)
    elif name == "fusion":
        holds = _bench_fusion(quick, out, as_json)
    elif name == "bd":
        holds = _bench_bd(quick, out, seeds, as_json)
    elif name == "activated":
        _bench_activated(quick, out, as_json)
        holds = True
    elif name == "retrieve":
        holds = bench_retrieve(quick, out, as_json)
    else:
        from vlora.bench import BENCHES
        from vlora.bench import main as run

        if name not in (*BENCHES, "all"):
            raise BadConfig(f"no bench named {name!r}; choose one of {', '.join((*BENCHES, *_ELSEWHERE))} or all")
        with waiting(f"bench {name}"):
            more = on | given | ({"latencies_us": latencies_us} if latencies_us else {})
            more |= {"quantize": quantize} if quantize else {}
            more |= {"parts": parts} if parts else {}
            holds = run(name, quick, out, only_json=as_json, **more)
        if name == "all":
            holds &= _bench_fusion(quick, out, as_json)
            holds &= _bench_bd(quick, out, None, as_json)
            _bench_activated(quick, out, as_json)
            holds &= bench_retrieve(quick, out, as_json)
    if not holds:
        sys.exit(1)


def _bench_paper(quick: bool, out: Path | None, figures: tuple[str, ...], only_json: bool) -> bool:
    """Draw the papers' figures into a folder."""
    from vlora.bench import require_matplotlib, save_report

    if out is None:
        raise BadConfig("vlora bench paper draws into a folder; give --out DIR")
    require_matplotlib()
    from vlora.bench.paper import measurements_folder, run

    stored = f"measurements so far are in {measurements_folder(quick, out)}; the same command continues"
    with waiting("bench paper"), ends_with(lambda: stored):
        report = run(quick, out, figures, lambda text: click.echo(text, err=True))
    report.print(only_json=only_json)
    save_report(report, None, out)
    return all(goal.holds for goal in report.goals)


def _bench_fusion(quick: bool, out: Path | None, only_json: bool) -> bool:
    """Run the bench of fusion here, because `vlora.bench` and `fusion` do not import each other."""
    from fusion.bench import draw, run
    from vlora.bench import require_matplotlib, save_report
    from vlora.bench.report import Goal, Report, environment

    if out is not None:
        require_matplotlib()
    work = None if out is None else out / "fusion" / "work"
    with waiting("bench fusion"):
        found = run(quick, work, lambda text: click.echo(text, err=True), environment())
    goals = [Goal(*goal) for goal in found.goals]
    stored = {"tables": found.tables, "curves": found.curves, "growth": found.growth, "origins": found.origins}
    report = Report("fusion", found.rows, goals, found=stored)
    report.print(only_json=only_json)
    if out is not None:
        save_report(report, lambda folder: draw(found.tables, found.curves, found.growth, folder), out)
    return all(goal.holds for goal in goals)


def _bench_bd(quick: bool, out: Path | None, seeds: int | None, only_json: bool) -> bool:
    """As `_bench_fusion`, for block-diagonal adapters."""
    from fusion.bench import NUM_SEEDS, compare
    from vlora.bench import save_report
    from vlora.bench.report import Goal, Report, environment

    work = None if out is None else out / "bd" / "work"
    with waiting("bench bd"):
        found = compare(quick, work, lambda text: click.echo(text, err=True), seeds or NUM_SEEDS, environment())
    goals = [Goal(*goal) for goal in found.goals]
    report = Report("bd", found.rows, goals, found={"runs": found.runs, "origins": found.origins})
    report.print(only_json=only_json)
    if out is not None:
        save_report(report, None, out)
    return all(goal.holds for goal in goals)


def _bench_activated(quick: bool, out: Path | None, only_json: bool) -> None:
    """As `_bench_fusion`, for activated adapters. It has no goal."""
    from fusion.bench import compare_activated
    from vlora.bench import save_report
    from vlora.bench.report import Report, environment

    work = None if out is None else out / "activated" / "work"
    with waiting("bench activated"):
        found = compare_activated(quick, work, lambda text: click.echo(text, err=True), environment())
    report = Report("activated", found.rows, [], found={"runs": found.runs, "origins": found.origins})
    report.print(only_json=only_json)
    if out is not None:
        save_report(report, None, out)
