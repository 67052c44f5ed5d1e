"""`vlora check`: what a checkpoint is, and what it needs on a device; `vlora gpu-check`: a GPU's own checks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.options import FOLDER, command, flag, model_path, print_json, settings_of
from vlora.cli.progress import waiting
from vlora.config import EngineConfig
from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.engine.model_check import ModelCheck

_SIZES = ("max_context", "max_batch_size", "block_size", "arena_bytes", "switching")


@command(cli, needs="serve")
@click.argument("model")
def check(
    model: str,
    memory_gib: float | None = flag(
        None, "Memory of the device, which need not be in this machine. Default: its free memory.", above=0
    ),
    adapters: int = flag(
        0,
        "Number of adapters to serve: shows how many are on the device at once, and the KV cache beside them.",
        least=0,
    ),
    rank: int = flag(16, "Rank of the adapters to count.", least=1),
    settings: dict[str, Any] = settings_of(EngineConfig, "device", "dtype", "quantize", "quantize_head", *_SIZES),
    *,
    as_json: bool,
) -> None:
    """Show whether the checkpoint MODEL is served, its limits, and the memory and the adapters that fit.

    \b
        vlora check Qwen/Qwen2.5-VL-7B-Instruct --adapters 20 --rank 16
        vlora check models/llava-7b --device cuda --memory-gib 24 --rank 32 --quantize fp8

    MODEL is a folder, a hub name, or `embedded`. Only the configuration, the tokenizer and the headers of the weights
    are read. Exit code 1 if the model is supported, but not complete or too large for the memory.
    """
    with waiting("loading torch and transformers"):
        from vlora.engine.model_check import check_model

    found = check_model(
        EngineConfig(model=model_path(model), **settings),
        adapter_rank=rank,
        wanted_adapters=adapters,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
    )
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        for name, text in _lines(found, adapters):
            click.echo(f"{name:<12}{text}")
    if found.problems:
        sys.exit(1)


def _lines(found: ModelCheck, wanted: int) -> list[tuple[str, str]]:
    quantized = f", the text model's linear layers in {found.quantize}" if found.quantize != "none" else ""
    lines = [
        ("family", f"{found.model_type}, for images{' and videos' * found.video}"),
        ("chat", f"tools {'as the chat template writes them' if found.takes_tools else 'in the system message'}"),
        (
            "text model",
            f"{found.text_model}: {found.num_layers} layers, hidden size {found.hidden_size}, {found.num_heads} heads, "
            f"{found.num_kv_heads} KV heads",
        ),
        ("weights", f"{found.num_parameters:,} parameters in {found.dtype}{quantized}, {_size(found.weight_bytes)}"),
        ("context", f"{found.max_context:,} tokens, {_size(found.kv_token_bytes)} of KV cache each"),
    ]
    if found.arena_bytes:
        merged = f"a shadow copy for merging {_size(found.shadow_bytes)}, " if found.shadow_bytes else ""
        lines += [
            (
                "memory",
                f"{_size(found.memory_bytes)} on {found.device_type}: weights {_size(found.weight_bytes)}, {merged}"
                f"arena {_size(found.arena_bytes)} ({found.arena_basis})",
            ),
            ("adapters", _adapters(found, wanted)),
            ("KV cache", f"{found.kv_tokens:,} tokens{' beside these adapters' * (wanted > 0)}"),
        ]
    if found.problems:
        return [*lines, *(("problem", text) for text in found.problems)]
    return [*lines, ("checkpoint", f"complete, {found.num_files} file{'s' * (found.num_files != 1)} of weights")]


def _adapters(found: ModelCheck, wanted: int) -> str:
    kind = f"of rank {found.adapter_rank} on all linear layers of the text model, {_size(found.adapter_bytes)} each"
    if wanted <= found.num_adapters:
        room = f"; there is room for {found.num_adapters:,}" if wanted else ""
        return f"{'all ' * (wanted > 1)}{wanted or found.num_adapters:,} {kind}, are on the device at once{room}"
    return (
        f"{found.num_adapters:,} of {wanted:,} {kind}, are on the device at once; the others are loaded when they are "
        f"requested; --arena-bytes {found.wanted_arena_bytes} has room for all"
    )


def _size(num_bytes: int) -> str:
    """A size in the largest binary unit of at least one."""
    power = next(power for power in (30, 20, 10) if num_bytes >= 2**power or power == 10)
    return f"{num_bytes / 2**power:.1f} {'KMG'[power // 10 - 1]}iB"


@command(cli, "gpu-check")
def gpu_check(
    out: Path = flag(None, "Folder of the results, a JSON file for each stage.", type=FOLDER, required=True),
    minutes: float = flag(9.5, "Time limit. Stages that do not fit are left for the next call.", above=0),
    stages: str | None = flag(None, "Names of stages, separated by commas. Default: all."),
    device: Literal["cuda", "cpu"] = flag(
        "cuda", "cpu runs every stage with small shapes, to check the stages themselves."
    ),
    *,
    as_json: bool,
) -> None:
    """Check and measure the engine on a GPU, in stages in order of value. Exit code 1 if a stage fails or misses a
    goal.

    \b
        vlora gpu-check --out gpu                          # repeat until no stage is left
        vlora gpu-check --out gpu --stages step,profile
        vlora gpu-check --out gpu-cpu --device cpu         # the stages themselves, in minutes

    Each stage runs in a process of its own and writes its JSON as soon as it ends. Another call skips the stages that
    succeeded with the same source files. The command needs torch, transformers, peft and msgspec; the JSON of a stage
    names a package that is missing. docs/gpu.md lists the stages.
    """
    from vlora.bench.gpu.runner import check, chosen, print_table

    if device == "cuda":
        _check_gpu()
    names = [] if stages is None else [name.strip() for name in stages.split(",") if name.strip()]
    with ends_with(lambda: f"the results so far are in {out}; the same command continues"):
        checked = check(out, device, minutes, chosen(names), lambda line: click.echo(line, err=True))
    if as_json:
        print_json(checked.as_dict())
    else:
        print_table(checked)
    if not checked.succeeded:
        sys.exit(1)


def _check_gpu() -> None:
    """Raises BadConfig if torch finds no GPU. Without torch, each stage reports that it is missing."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        raise BadConfig("torch finds no CUDA device; --device cpu runs the stages themselves, with small shapes")
