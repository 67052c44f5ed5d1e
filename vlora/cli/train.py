"""Commands that make adapters, and the embedded model."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, content_hash
from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.options import client_of, command, flag, print_json
from vlora.cli.progress import waiting
from vlora.config import EngineConfig
from vlora.errors import BadConfig, BadPlan, listed
from vlora.run_folder import UNFINISHED, remove, writing
from vlora.types.composition import MAX_NAME

if TYPE_CHECKING:
    from vlora.client import Client


@command(cli, needs="fuse")
@click.argument("plan", type=click.Path(path_type=Path))
def fuse(
    plan: Path,
    out: Path | None = flag(None, "Folder for adapters and report."),
    device: str = flag(EngineConfig.device, "Device to train on: cpu or cuda."),
    check: bool = flag(False, "Explain the plan and report all errors in it, without training."),
    dry_run: bool = flag(False, "Show which trainings in --out are reused, and how long others take."),
    resume: bool = flag(False, "Reuse the trainings in --out, of an interrupted run or another plan."),
    restart: bool = flag(False, "Train everything again; delete the results of an earlier run in --out."),
    oracle: bool = flag(False, "Also find the minimum number of adapters; requires many more trainings."),
    workers: int = flag(1, "Number of parallel trainings, one CPU thread each.", least=1),
    serve_to: str | None = flag(
        None,
        "A server on this machine that serves --out: it takes the new adapters when the run ends, without losing a "
        "request. Token and TLS come from the variables of `vlora adapters`.",
        metavar="HOST:PORT",
    ),
    *,
    as_json: bool,
) -> None:
    """Train adapters and task heads from a fusion plan: a file, or the name of one in the package.

    \b
        vlora fuse plan.yaml --check
        vlora fuse plan.yaml --out out
        vlora fuse plan.yaml --out out --resume
        vlora fuse changed.yaml --out out --dry-run
        vlora fuse demo --out demo

    Ctrl-C and a termination signal end the run immediately. Finished trainings are kept; the last line printed is the
    command that resumes the run.

    With a changed plan, --resume keeps the adapters of the earlier run and trains only what the change affects.
    """
    import warnings

    from fusion.folder import ResumeHint, same_command
    from fusion.plan.schema import read_plan_file

    # Warnings of third-party libraries, addressed to their own callers.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", module=r"peft\.")
    path = _plan_file(plan)
    file = read_plan_file(path)  # an error is reported before torch loads
    replacing: Any = contextlib.nullcontext
    if serve_to is not None:
        files = [os.environ.get(f"VLORA_TLS_{name}") for name in ("CA", "CERT", "KEY")]
        server = client_of(serve_to, *files, flag="--serve-to")
        server.adapters()  # an error is reported before the run, and by --check and --dry-run
        replacing = functools.partial(replacing_served, server)
    if check:
        from fusion.plan import summary

        sheet = path.with_name(f"{path.stem}-data.png") if path == plan else None  # none of a packaged plan
        summary.explain(file, device=device, json_out=as_json, sheet=sheet)
    elif out is None:
        raise click.UsageError("--out is missing: a folder for adapters and report (or --check, to train nothing)")
    elif dry_run and (restart or as_json):
        why = "--restart reuses nothing; --check estimates a run from nothing" if restart else "it prints lines"
        raise click.UsageError(f"--dry-run excludes {'--restart' if restart else '--json'}: {why}")
    elif dry_run:
        from fusion import run

        run.preview(file, out, device=device)
    elif resume and restart:
        raise click.UsageError("--resume and --restart exclude each other; give one of them")
    else:
        from rich.console import Console

        resume_hint = ResumeHint(out, restart=restart)
        with ends_with(lambda: f"{resume_hint}; resume with: {same_command(sys.argv, resume_hint.option)}"):
            from fusion import run  # an interrupt during the imports is handled in the same way

            report = run.fuse(
                file,
                out,
                device=device,
                resume=resume,
                restart=restart,
                oracle=oracle,
                workers=workers,
                console=Console(stderr=as_json),
                resume_hint=resume_hint,
                replacing=replacing,
            )
        if as_json:
            print_json(report)


@contextlib.contextmanager
def replacing_served(client: Client, folder: Path) -> Iterator[None]:
    """A block that replaces the adapters in a folder, while a server on this machine serves them.

    The server reads the former contents before the block, so that it needs no file meanwhile, and the new ones after
    it; adapters that are no longer in the folder are unloaded. Requests in progress continue with the content with
    which they began.
    """
    served = {status.name: status for status in client.adapters()}
    former = {name: content_hash(path) for name, path in _in(folder).items() if name in served}
    for name, version in tuple(former.items()):
        if not served[name].loaded:
            client.load_adapter(name, folder.absolute() / name)
        elif served[name].version != version:
            del former[name]  # another folder's adapter
    yield
    new = _in(folder)

    lost = {name: {each.name for each in served[name].domains} - _domains(new[name]) for name in new.keys() & served}
    order = sorted(new, key=lambda name: len(lost.get(name, ())))  # those that lose domains follow the others
    loaded: set[str] = set()
    left = {f"{name}.next" for name in served.keys() & new} & (served.keys() - new.keys())  # by a run that failed
    try:
        for place, name in enumerate(order):
            for later in order[place + 1 :]:
                extra, moved = f"{later}.next", lost.get(name, set()) & _domains(new[later])
                if moved and extra not in loaded | new.keys() and len(extra) <= MAX_NAME:  # domains move both ways
                    client.load_adapter(extra, new[later].absolute())
                    loaded.add(extra)
                    left.add(extra)
            path, status = new[name], served.get(name)
            if status is not None and (former.get(name) or status.version) == content_hash(path):
                continue
            if status is not None and status.pinned:
                client.pin_adapter(name, False)
            client.load_adapter(name, path.absolute())
            if status is not None and status.pinned:
                client.pin_adapter(name)
            click.echo(f"{name}  {'loaded' if status is None else 'replaced'}", err=True)
        while left:
            client.unload_adapter(min(left), drain=True)
            left.remove(min(left))
    except BaseException:
        if left:
            click.echo(f"left on the server: {listed(left)}; run again, or unload them", err=True)
        raise
    for name in former.keys() - new.keys():
        client.unload_adapter(name, drain=True)
        click.echo(f"{name}  unloaded", err=True)


def _in(folder: Path) -> dict[str, Path]:
    return {file.parent.name: file.parent for file in sorted(folder.glob(f"[!.]*/{CONFIG_FILE}"))}


def _domains(folder: Path) -> set[str]:
    """The names of the domains, or of the heads, that an adapter's folder has."""
    for file, field in ((folder / DOMAINS_FILE, "domains"), (folder / HEAD_FILES[0], "heads")):
        if file.exists():
            return {one["name"] for one in json.loads(file.read_bytes())[field]}
    return set()


def _loading() -> AbstractContextManager[object]:
    """Shows a spinner during imports, which take seconds, on a slow machine more than ten."""
    return waiting("loading torch, transformers and peft")


def _plan_file(plan: Path) -> Path:
    """The plan file, or that of a plan in the package. Raises BadPlan if there is neither.

    A folder is no plan: `vlora demo --out demo` and its repetition find the packaged plan beside the folder `demo`.
    """
    import fusion

    if plan.exists() and not plan.is_dir():
        return plan
    packaged = {file.stem: file for file in sorted((Path(fusion.__file__).parent / "plans").glob("*.yaml"))}
    if str(plan) in packaged:
        return packaged[str(plan)]
    found = "is a folder" if plan.is_dir() else "no such file"
    raise BadPlan(f"{plan}: {found}, and no plan of that name in the package ({', '.join(packaged)})")


def _remove_abandoned(out: Path) -> None:
    """Delete what processes of this machine that were killed have left beside an output."""
    for left in out.parent.glob(f"{UNFINISHED}[0-9]*-{glob.escape(out.name)}"):
        if not os.path.exists(f"/proc/{left.name.removeprefix(UNFINISHED).partition('-')[0]}"):
            remove(left)


@command(cli, "convert-bd", needs="fuse")
@click.argument("adapter", type=click.Path(path_type=Path))
def convert_bd(
    adapter: Path,
    blocks: int = flag(None, "Number of blocks: the number of ranks that will serve it.", least=2, required=True),
    rank: int | None = flag(None, "Rank of the result. Default: each layer's own.", least=1),
    base: str | None = flag(None, "Base model. Default: the one that the adapter names.", "--model"),
    data: Path | None = flag(
        None, "Plan with the domains for distillation and evaluation: a file, or the name of one in the package."
    ),
    out: Path | None = flag(None, "Output folder. Default: ADAPTER-bdN."),
    *,
    as_json: bool,
) -> None:
    """Convert an existing LoRA to block-diagonal form (BD-LoRA), which ranks serve without extra communication.

    \b
        vlora convert-bd out/adapters/signs --blocks 2
        vlora convert-bd out/adapters/signs --blocks 2 --rank 12 --data plan.yaml
        vlora convert-bd demo/fused/adapters/boxes --blocks 2 --data demo

    Every block of every layer is the best approximation of its rank (truncated SVD). With --data, the result is then
    trained to match the original. At a rank of --blocks times the original's, the conversion is exact.
    """
    import warnings

    from rich.console import Console

    with _loading():
        from fusion.block_diagonal.convert import convert
        from fusion.plan.schema import read_plan_file
        from fusion.progress import Progress

    warnings.simplefilter("ignore", FutureWarning)
    out = out or adapter.with_name(f"{adapter.name}-bd{blocks}")
    plan = None if data is None else read_plan_file(_plan_file(data))
    _remove_abandoned(out)
    with Progress(Console(stderr=True)) as progress:
        found = convert(adapter, out, blocks=blocks, rank=rank, base=base, data=plan, progress=progress)
    if as_json:
        layers, domains = [each._asdict() for each in found.layers], [each._asdict() for each in found.domains]
        print_json({"out": str(out), "layers": layers, "domains": domains})
        return
    for layer in found.layers:
        kind = "dense, unchanged" if layer.blocks is None else f"rank {layer.rank}, error {layer.error:.4f}"
        click.echo(f"{layer.layer}  {kind}")
    for domain in found.domains:
        click.echo(
            f"{domain.domain}: test score {domain.original:.3f} before, {domain.converted:.3f} converted, "
            f"{domain.distilled:.3f} distilled; hidden states apart by {domain.apart_converted:.3f}, "
            f"then {domain.apart_distilled:.3f}"
        )
    click.echo(f"written to {out}")


@command(cli, "convert-lora", needs="serve")
@click.argument("adapter", type=click.Path(path_type=Path))
def convert_lora(
    adapter: Path,
    rank: int = flag(None, "Rank of the result.", least=1, required=True),
    out: Path | None = flag(None, "Output folder. Default: ADAPTER-loraR."),
    *,
    as_json: bool,
) -> None:
    """Convert a LoHa or LoKr adapter of PEFT, which cannot be served, to a LoRA.

    \b
        vlora convert-lora out/loha --rank 16

    Every layer gets the best approximation of its rank (truncated SVD). Errors are relative Frobenius norms. A LoHa of
    rank r is converted exactly at rank r * r.
    """
    with waiting("loading torch"):
        from vlora.lora.dense_to_lora import convert, total_error

    out = out or adapter.with_name(f"{adapter.name}-lora{rank}")
    _remove_abandoned(out)
    layers = convert(adapter, out, rank)
    if as_json:
        print_json({"out": str(out), "error": total_error(layers), "layers": [layer._asdict() for layer in layers]})
        return
    for layer in layers:
        click.echo(f"{layer.layer}  rank {layer.rank}, error {layer.error:.4f}")
    click.echo(f"all layers: error {total_error(layers):.4f}")
    click.echo(f"written to {out}")


@command(cli, needs="demo")
def demo(
    out: Path = flag(Path("demo"), "Output folder."),
    plan: str = flag("demo", "Fusion plan: a file, or one in the package by name."),
    full: bool = flag(False, "Eight domains instead of five: the plan demo-full. Takes three times as long."),
    *,
    as_json: bool,
) -> None:
    """Run the whole pipeline once: fuse, serve, query, stream, compare modes. Takes some minutes.

    \b
        vlora demo
        vlora demo --full
        vlora demo --json | jq .latencies
    """
    if full and plan != "demo":
        raise click.UsageError("give --full or --plan, not both")
    import signal

    from rich.console import Console

    from apps.demo import run

    # A normal exit also ends the server and the training that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with writing(out, only_disks=True):
        result = run(out, plan="demo-full" if full else plan, console=Console(stderr=as_json))
    if as_json:
        print_json(result)


@cli.group()
def model() -> None:
    """The small model that ships with the package.

    \b
        vlora model eval
    """


@command(model, "eval", needs="fuse")
def model_eval(
    quick: bool = flag(False, "One seed and few pictures; figures are rough."),
    quantize: Literal["fp8", "int8", "int4"] | None = flag(
        None, "Instead, compare the answers of weights in this format with those of the unquantized ones."
    ),
    quantize_head: bool = flag(False, "With --quantize: quantize the output head, too."),
    *,
    as_json: bool,
) -> None:
    """Measure every goal of the embedded model. The last line is JSON; with --json it is the only line. Exit code 1 if
    a goal is not met.

    \b
        vlora model eval --quick
        vlora model eval --quantize int8
    """
    import logging
    import warnings

    import torch

    from fusion.embedded import checkpoint_path
    from fusion.embedded.exam import compare, examine
    from vlora.bench.report import Goal, Report

    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("vlora").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # the goals are defined for one core
    if quantize_head and quantize is None:
        raise BadConfig("--quantize-head needs a format; set --quantize too")
    settings: dict[str, Any] = {
        "seeds": (1_000_001, 1_000_002, 1_000_003)[: 1 if quick else 3],
        "num_scenes": 60 if quick else 200,
        "say": lambda text: click.echo(text, err=True),
    }
    if quantize is not None:
        settings |= {"quantize": quantize, "quantize_head": quantize_head}
    with waiting("examining"):
        rows, gates = (examine if quantize is None else compare)(checkpoint_path(), **settings)
    goals = [Goal(*gate) for gate in gates]
    report = Report("model eval", [row._asdict() for row in rows], goals, title="vlora model eval")
    report.print(only_json=as_json)
    if not all(goal.holds for goal in goals):
        sys.exit(1)
