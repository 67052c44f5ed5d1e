"""Measurement commands: `simulate`, `bench`."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from vlora.bench.workload import Workload
from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.options import FOLDER, command, flag, long_flag, print_json, settings_of
from vlora.cli.progress import waiting
from vlora.config import EngineConfig, Quantize
from vlora.errors import BadConfig
from vlora.run_folder import writing
from vlora.simulator.cluster_config import ClusterConfig

_SCHEDULING = ("policy", "theta_s", "max_batch_size", "max_step_tokens", "max_ttft_s", "weight", "tenant_weight")


_CLUSTER = (
    *("replicas", "rule", "over", "max_replicas", "start_s", "mtbf_s", "detect_s", "restart_s", "report_s"),
    *("report_age_s", "rebalance_s"),
)


@command(cli)
@click.argument("trace", required=False)
def simulate(
    trace: str | None,
    journal: str | None = flag(
        None,
        "Repeat the routing of a file of `vlora serve --routing-journal` instead, and compare the decisions.",
        "--replay",
        type=click.Path(exists=True, dir_okay=False),
    ),
    settings: dict[str, Any] = settings_of(EngineConfig, *_SCHEDULING),
    adapters: int = flag(20, "Number of adapters.", least=1),
    tenants: int = flag(
        0,
        "Tenants that share the requests without a tenant, by a power law: tenant-0 sends most.",
        least=0,
    ),
    requests: int | None = flag(
        None, "Maximum number of requests. Default: 1000 of a workload, all of a file.", least=1
    ),
    seed: int = flag(0, "Random seed of the workload."),
    costs: Path | None = flag(
        None, "Machine costs: JSON of `vlora bench costs --out`. Default: the file in the package."
    ),
    cluster: dict[str, Any] = settings_of(ClusterConfig, *_CLUSTER),
    quick: bool | None = flag(
        None,
        "Simulate stretches of unmerged steps, or each step. Default: --quick with more than 16 replicas.",
        "--quick/--full",
    ),
    *,
    as_json: bool,
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
    source = click.get_current_context().get_parameter_source("policy")
    policy = settings.pop("policy")
    if source is ParameterSource.DEFAULT:
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


@dataclasses.dataclass(frozen=True)
class _BenchOptions:
    """Options of benchmarks, which hold the defaults."""

    latencies_us: tuple[int, ...] = flag(
        (), "Of `tp`: microseconds added to each collective; may be repeated.", "--latency-us", least=0
    )
    figures: tuple[str, ...] = flag(
        (),
        "Of `paper`: only this figure, such as v-lora:fig14 or s-lora:table3; may be repeated.",
        "--figure",
        metavar="PAPER:NUMBER",
    )
    model: str | None = flag(
        None,
        "Of `costs`: qwen2-0.5b (default), qwen2-vl-7b or llava-13b. Of `serve`: the base model's name at --url.",
    )
    device: str | None = flag(None, "Of `costs`: cpu (default) or cuda.")
    quantize: Quantize | None = flag(
        None, "Of `step`: compare weights in this format with bfloat16.", choices=("fp8", "int8", "int4")
    )
    rounds: int | None = flag(None, "Of `serve`: repetitions of server and baselines in turn; default 3.", least=1)
    dtype: Literal["bfloat16", "float32"] | None = flag(None, "Of `serve`: dtype of the server; default bfloat16.")
    url: str | None = flag(
        None,
        "Of `serve`: measure this server instead: URL of its OpenAI API with the path; OPENAI_API_KEY is its token.",
    )
    surfaces: tuple[Literal["http", "rpyc"], ...] = flag((), "Of `serve`: default http; may be repeated.", "--surface")
    threads: tuple[int, ...] = flag((), "Of `serve`: default: the server's default, then 1; may be repeated.", least=1)
    cases: tuple[Literal["one", "base", "adapters"], ...] = flag(
        (),
        "Of `serve`: one request, many of the base model, many of adapters; default all; may be repeated.",
        "--case",
    )
    adapter_names: tuple[str, ...] = flag(
        (), "Of `serve`: name of an adapter at --url; may be repeated.", "--adapter-name"
    )


@command(cli, needs="fuse")
@click.argument("name")
def bench(
    name: str,
    quick: bool = flag(False, "Fewer repetitions; figures are rough."),
    out: Path | None = flag(None, "Folder for reports and plots.", type=FOLDER),
    options: dict[str, Any] = settings_of(_BenchOptions),
    workload: dict[str, Any] = settings_of(Workload),
    *,
    as_json: bool,
) -> None:
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
    context, asked = click.get_current_context(), dict[str, Any]()
    for option in context.command.params:
        named = option.name or ""
        if named in options | workload and context.get_parameter_source(named) is not ParameterSource.DEFAULT:
            assert isinstance(option, click.Option)
            asked[named] = (options | workload)[named]
            of = ["serve"] if named in workload else re.findall(r"Of `(\w+)`", option.help or "")
            if name not in of:
                names = " and ".join(f"`{each}`" for each in of)
                raise BadConfig(
                    f"--{long_flag(option)} is valid for `vlora bench {names[1:]} only, not for {name!r}; remove it"
                )
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # before a bench of minutes or hours
        except OSError as error:
            raise BadConfig(f"--out: the folder {str(out)!r} cannot be created: {error.strerror}") from error
    from vlora.bench import harness

    hint = "" if out is None else f"finished measurements are in {out}; the same command continues"
    with waiting(f"bench {name}"), ends_with(lambda: hint), writing(out or ".", only_disks=True):
        holds = harness.run(name, quick, out, only_json=as_json, **asked)
    if not holds:
        sys.exit(1)
