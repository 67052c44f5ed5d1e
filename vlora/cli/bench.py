"""Measurement commands: `simulate`, `bench`."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

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
    if seeds is not None and (name != "bd" or quick):
        raise BadConfig("--seeds is valid for `vlora bench bd` without --quick only (--quick uses one seed); remove it")
    on: dict[str, Any] = {key: value for key, value in (("model", model), ("device", device)) if value is not None}
    if on and name not in ("policy", "costs") and not (name == "serve" and device is None):
        raise BadConfig(
            f"--model and --device are valid for `vlora bench policy` and `costs` only, not for {name!r}; remove them"
        )
    own = {
        "tp": ("--latency-us", "latencies_us", latencies_us),
        "step": ("--quantize", "quantize", quantize),
        "split": ("--part", "parts", parts),
        "paper": ("--figure", "figures", figures),
    }
    for of, (flag, setting, value) in own.items():
        if value and name != of:
            raise BadConfig(f"{flag} is valid for `vlora bench {of}` only, not for {name!r}; remove it")
        if value:
            on[setting] = value
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # before a bench of minutes or hours
        except OSError as error:
            raise BadConfig(f"--out: the folder {str(out)!r} cannot be created: {error.strerror}") from error
    if name in _ELSEWHERE:
        holds = _ELSEWHERE[name](quick, out, as_json, **on | ({"seeds": seeds} if seeds else {}))
    else:
        from vlora.bench import BENCHES
        from vlora.bench import main as run

        if name not in (*BENCHES, "all"):
            raise BadConfig(f"no bench named {name!r}; choose one of {', '.join((*BENCHES, *_ELSEWHERE))} or all")
        with waiting(f"bench {name}"):
            holds = run(name, quick, out, only_json=as_json, **on, **given)
        if name == "all":
            holds &= all([_ELSEWHERE[each](quick, out, as_json) for each in _ELSEWHERE if each != "paper"])
    if not holds:
        sys.exit(1)


def _bench_paper(quick: bool, out: Path | None, only_json: bool, figures: tuple[str, ...] = ()) -> bool:
    """Draw the papers' figures into a folder."""
    from vlora.bench import finish, require_matplotlib

    if out is None:
        raise BadConfig("vlora bench paper draws into a folder; give --out DIR")
    require_matplotlib()
    from vlora.bench.paper import measurements_folder, run

    stored = f"measurements so far are in {measurements_folder(quick, out)}; the same command continues"
    with waiting("bench paper"), ends_with(lambda: stored):
        report = run(quick, out, figures, _say)
    return finish(report, None, out, only_json)


def _bench_fusion(quick: bool, out: Path | None, only_json: bool) -> bool:
    """Run the bench of fusion here, because `vlora.bench` and `fusion` do not import each other."""
    from fusion.bench import draw, run
    from vlora.bench import finish, require_matplotlib
    from vlora.bench.report import Goal, Report, environment

    if out is not None:
        require_matplotlib()
    with waiting("bench fusion"):
        found = run(quick, _work("fusion", out), _say, environment())
    stored = {"tables": found.tables, "curves": found.curves, "growth": found.growth, "origins": found.origins}
    report = Report("fusion", found.rows, [Goal(*goal) for goal in found.goals], found=stored)
    return finish(report, lambda folder: draw(found.tables, found.curves, found.growth, folder), out, only_json)


def _bench_bd(quick: bool, out: Path | None, only_json: bool, seeds: int | None = None) -> bool:
    """As `_bench_fusion`, for block-diagonal adapters."""
    from fusion.bench import NUM_SEEDS, compare
    from vlora.bench import finish
    from vlora.bench.report import Goal, Report, environment

    with waiting("bench bd"):
        found = compare(quick, _work("bd", out), _say, seeds or NUM_SEEDS, environment())
    goals = [Goal(*goal) for goal in found.goals]
    return finish(
        Report("bd", found.rows, goals, found={"runs": found.runs, "origins": found.origins}), None, out, only_json
    )


def _bench_activated(quick: bool, out: Path | None, only_json: bool) -> bool:
    """As `_bench_fusion`, for activated adapters. It has no goal."""
    from fusion.bench import compare_activated
    from vlora.bench import finish
    from vlora.bench.report import Report, environment

    with waiting("bench activated"):
        found = compare_activated(quick, _work("activated", out), _say, environment())
    report = Report("activated", found.rows, [], found={"runs": found.runs, "origins": found.origins})
    return finish(report, None, out, only_json)


def _bench_retrieve(quick: bool, out: Path | None, only_json: bool) -> bool:
    """Run the bench here, because neither `fusion` nor `apps` imports the other. Returns whether its goals are met."""
    from apps.retrieval.measuring import goals_of
    from vlora.bench import finish, require_matplotlib
    from vlora.bench.report import Goal, Report

    if out is not None:
        require_matplotlib()
    with tempfile.TemporaryDirectory() as temporary, waiting("bench retrieve"):
        work = Path(temporary) if out is None else out / "retrieve" / ("quick" if quick else "work")
        work.mkdir(parents=True, exist_ok=True)
        rows, found = _measure_retrieval(quick, work)
        goals = [] if quick else [Goal(*goal) for goal in goals_of(rows)]
        report = Report("retrieve", rows, goals, found=found)
        if out is not None:
            for sheet in work.glob("*.png"):
                sheet.replace(out / "retrieve" / sheet.name)
    return finish(report, None, out, only_json)


def _measure_retrieval(quick: bool, work: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and further values for the JSON."""
    from apps.retrieval.measuring import measure
    from apps.server_process import serving
    from fusion.bench.result_store import origins
    from fusion.bench.retrieval import ADAPTER, QUESTION, prepare
    from vlora.bench.report import environment

    # In a process of its own, which gives the memory of the training back before the server starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        prepared = pool.submit(prepare, quick, work, _say, environment()).result()
    rows: list[dict[str, Any]] = []
    with serving(prepared.base, Path(prepared.adapters), options=("--threads", "1")) as client:
        for collection in prepared.collections:
            rows += measure(
                client,
                Path(collection.folder),
                work,
                collection.queries,
                name=collection.name,
                adapter=ADAPTER,
                num_frames=collection.num_frames,
                base_caption=collection.base_caption,
                caption=collection.caption,
                question=QUESTION,
                say=_say,
                sheet=work / f"{collection.name}.png",
            )
    trained = {"test scores": prepared.scores, "training CPU s": prepared.training_cpu_s}
    return rows, {"adapter": trained, "origins": origins({"adapter": {"origin": prepared.origin}})}


def _say(text: str) -> None:
    click.echo(text, err=True)


def _work(name: str, out: Path | None) -> Path | None:
    """The folder of a resumable bench's intermediate results."""
    return None if out is None else out / name / "work"


_ELSEWHERE: dict[str, Callable[..., bool]] = {
    "paper": _bench_paper,
    "fusion": _bench_fusion,
    "bd": _bench_bd,
    "activated": _bench_activated,
    "retrieve": _bench_retrieve,
}
"""Benches that are not of `vlora.bench`, in the order of "all", which does not include `paper`."""
