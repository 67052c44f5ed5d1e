"""`vlora convert-bd`: conversion of a LoRA to block-diagonal form (BD-LoRA), which needs no extra communication."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig

from fusion.block_diagonal.blocks import block_side, next_multiple, undivided_layer
from fusion.block_diagonal.distil import DistillationScores, distil
from fusion.embedded import checkpoint_path
from fusion.plan.check import check_plan
from fusion.plan.schema import PlanFile
from fusion.progress import Progress
from heads.storage import write_tensors
from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, WEIGHTS_FILE
from vlora.errors import BadAdapter, BadConfig
from vlora.lora.peft_format import AdapterHeader, read_config, read_header
from vlora.lora.peft_target import SiteShape
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model
from vlora.models.pretrained import from_pretrained
from vlora.parallel.adapter_sharding import Blocks
from vlora.parallel.layer_sharding import COLUMN_PARALLEL, ROW_PARALLEL
from vlora.run_folder import whole, writing


class ConvertedLayer(NamedTuple):
    """error: relative Frobenius error of its delta; 0 if the layer stays dense (blocks None)."""

    layer: str
    blocks: Blocks | None
    rank: int
    error: float


class Conversion(NamedTuple):
    """domains: scores before and after conversion and distillation; empty without data."""

    layers: list[ConvertedLayer]
    domains: list[DistillationScores]


def convert(
    adapter: Path,
    out: Path,
    *,
    blocks: int,
    rank: int | None = None,
    base: str | None = None,
    data: PlanFile | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write `adapter`, its heads unchanged, to the folder `out` in PEFT's format with `blocks` blocks.

    Either all of `out` is written, or nothing.

    Args:
        rank: rank of every converted layer; None keeps each layer's own.
        base: the base model; None for the one that the adapter names.
        data: a plan for distillation: the result is trained on its domains to answer like the adapter. Only domains,
            training and seed are used.

    Raises:
        BadAdapter: the adapter cannot be converted.
        BadConfig: `out` exists, or the base model is unknown or cannot be loaded.
        BadPlan: `data` cannot be used.
    """
    if not adapter.is_dir():
        raise BadAdapter(f"{adapter} is not a folder; an adapter is a folder in PEFT's format")
    if out.exists():
        raise BadConfig(f"{out} already exists; choose another folder with --out")
    config = read_config(adapter)
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise BadConfig(f"{adapter} does not name its base model; give it with --model")
    base = checkpoint_path() if base == "embedded" else base
    header = _read(adapter, base)
    ranks = _ranks(header, blocks, rank)
    progress = progress or Progress()
    checked = None if data is None else check_plan(data, progress)
    with writing(out), whole(out, durable=False) as part:
        layers = _write(header, config, ranks, blocks, part, progress)
        domains = [] if checked is None else distil(header, part, base, checked, progress)
    return Conversion(layers, domains)


def _read(adapter: Path, base: str) -> AdapterHeader:
    """Read an adapter's header and check it against the base model's shapes, without loading weights."""
    try:
        hf_model = HFModel(dummy_model(from_pretrained(AutoConfig, base), "float32", torch.device("meta"), seed=0))
    except (OSError, ValueError) as error:
        raise BadConfig(f"the base model {base} cannot be loaded; choose another with --model: {error}") from error
    sites = {
        name: SiteShape(layer.in_features, layer.out_features, vision)
        for vision, linears in ((False, hf_model.language_linears), (True, hf_model.vision_linears))
        for name, layer in linears.items()
    }
    header = read_header(adapter, sites, hf_model.hidden_size)
    if header.has_blocks:
        raise BadAdapter(f"{adapter} is already block-diagonal; it can be served unchanged on any number of ranks")
    if any(target.cut.shape.rows for target in header.targets):
        raise BadAdapter(f"{adapter} has DoRA or trained biases, which block-diagonal adapters do not have in PEFT")
    if fused := next((target for target in header.targets if target.part is not None), None):
        raise BadAdapter(
            f"{adapter} has {fused.first_tensor!r}, of a layer that is several layers here; such adapters cannot be "
            "converted"
        )
    return header


def _ranks(header: AdapterHeader, blocks: int, wanted: int | None) -> dict[str, int]:
    """The rank of each layer that gets blocks, by name. Raises BadAdapter if a layer cannot have them."""
    ranks = {}
    for target in header.targets:
        if target.vision or block_side(target.site) is None:
            leaf = target.site.rpartition(".")[2]
            if taken := [name for name in (*COLUMN_PARALLEL, *ROW_PARALLEL) if name in leaf]:
                raise BadAdapter(
                    f"{header.path} adapts {target.site}, which is not sharded and so gets no blocks, but PEFT expects "
                    f"blocks in every layer with {taken[0]} in the last part of its name"
                )
            continue
        d_in, d_out = target.disk[0][1], target.disk[1][0]
        if wrong := undivided_layer(target.site, d_in, d_out, blocks):
            raise BadAdapter(f"{header.path}: {wrong}")
        rank = wanted or target.rank
        if rank % blocks:
            raise BadAdapter(
                f"{header.path}: {blocks} blocks do not divide rank {rank} of {target.site}; "
                f"--rank {next_multiple(rank, blocks)} works"
            )
        ranks[target.site] = rank
    if not ranks:
        raise BadAdapter(f"{header.path} adapts no sharded layer, so there is nothing to convert")
    return ranks


def _write(
    header: AdapterHeader,
    config: Mapping[str, Any],
    ranks: Mapping[str, int],
    blocks: int,
    folder: Path,
    progress: Progress,
) -> list[ConvertedLayer]:
    layers: list[ConvertedLayer] = []
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, int] = {}
    factors = load_file(header.path / WEIGHTS_FILE)
    with progress.work(f"converting {header.path}", len(header.targets), "layers") as update:
        for target in header.targets:
            a, b = factors[target.tensor_a], factors[target.tensor_b].double() * target.scale
            if not (a.isfinite().all() and b.isfinite().all()):
                raise BadAdapter(f"{header.path}: the factors of {target.site} contain values that are not finite")
            side = block_side(target.site)
            made = None if side is None else Blocks(side, blocks)
            rank, error = ranks.get(target.site, target.rank), 0.0
            if made is not None:
                a, b, error = nearest_blocks(a, b, made, rank)
            tensors[target.tensor_a], tensors[target.tensor_b] = (each.float().contiguous() for each in (a, b))
            layers.append(ConvertedLayer(target.site, made, rank, error))
            # PEFT matches the layer's name in the file against patterns.
            by_module[target.tensor_a.removeprefix("base_model.model.").removesuffix(".lora_A.weight")] = rank
            update(len(layers))
    folder.mkdir(parents=True)
    write_tensors(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **_settings(by_module, layers, blocks)}, indent=2) + "\n")
    for file in (*HEAD_FILES, DOMAINS_FILE):
        if (header.path / file).exists():
            shutil.copyfile(header.path / file, folder / file)
    return layers


def _settings(ranks: Mapping[str, int], layers: Sequence[ConvertedLayer], blocks: int) -> dict[str, Any]:
    """Adapter config. The scaling is part of the factors, so alpha equals the rank of each layer."""
    most = max(ranks.values())
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != most}
    leaves = {
        side: sorted({layer.layer.rpartition(".")[2] for layer in layers if layer.blocks and layer.blocks.side == side})
        for side in "ab"
    }
    return {
        "r": most,
        "lora_alpha": most,
        "use_rslora": False,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_bdlora": {
            "target_modules_bd_a": leaves["a"],
            "target_modules_bd_b": leaves["b"],
            "nblocks": blocks,
            "match_strict": all(layer.blocks is not None for layer in layers),
        },
    }


class BlockApproximation(NamedTuple):
    """Factors in PEFT's block-diagonal format, and the error of their delta: its Frobenius norm relative to that of the
    original delta."""

    a: Tensor
    b: Tensor
    error: float


def nearest_blocks(a: Tensor, b: Tensor, blocks: Blocks, rank: int) -> BlockApproximation:
    """The factors with N blocks and total rank `rank` with the delta nearest to b a.

    With a block-diagonal B (side b), block i of the outputs is B_i A_i: B_i [d_out / N, rank / N] is its block, and
    A_i [rank / N, d_in] are rows of A that no other block uses. With a block-diagonal A (side a), block i of the inputs
    gives B_i A_i, with A_i its block and B_i columns of B that no other block uses. In both cases the delta consists of
    N blocks D_i that share no parameters, and B_i A_i can be any matrix of rank up to rank / N. The squared Frobenius
    error is the sum over blocks of |D_i - B_i A_i|^2, so each term is minimised separately by truncated SVD (Eckart and
    Young): the error is the sum of the squares of D_i's singular values beyond the first rank / N. The split of
    B_i A_i into two factors is arbitrary; here it is balanced.

    D_i has rank r at most, so its SVD is that of an r x r matrix between two orthonormal bases, in float64. At
    rank = N r the error is 0.

    Args:
        a: [r, d_in].
        b: [d_out, r].
        rank: divisible by N, like the sharded dimension.
    """
    each = rank // blocks.num
    on_a = blocks.side == "a"
    a, b = a.double(), b.double()
    pairs = [(part, b) for part in a.chunk(blocks.num, 1)] if on_a else [(a, part) for part in b.chunk(blocks.num)]
    all_a, all_b, lost, whole = [], [], 0.0, 0.0
    for own_a, own_b in pairs:
        basis_b, core_b = torch.linalg.qr(own_b)
        basis_a, core_a = torch.linalg.qr(own_a.t())
        left, values, right = torch.linalg.svd(core_b @ core_a.t(), full_matrices=False)
        kept = min(each, len(values))
        half = values[:kept].sqrt()
        empty = each - kept  # unused rank beyond the block's own
        all_a.append(pad(half[:, None] * (right[:kept] @ basis_a.t()), (0, 0, 0, empty)))
        all_b.append(pad(basis_b @ left[:, :kept] * half, (0, empty)))
        lost += float(values[kept:].square().sum())
        whole += float(values.square().sum())
    error = (lost / whole) ** 0.5 if whole else 0.0
    return BlockApproximation(torch.cat(all_a), torch.cat(all_b, 1 if on_a else 0), error)
