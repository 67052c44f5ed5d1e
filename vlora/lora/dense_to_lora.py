"""`vlora convert-lora`: adapters of PEFT's LoHa and LoKr as LoRA, by truncated singular value decomposition.

Their deltas are products of small matrices, so the decomposition is computed from those, without the dense delta:

* LoHa (arXiv:2108.06098): (A1 B1) * (A2 B2), elementwise, is the product of the row-wise Kronecker product of A1 and A2
  and the column-wise one of B1 and B2, of rank r^2.
* LoKr (arXiv:2212.10650): the singular values and vectors of kron(W1, W2) are the Kronecker products of those of the
  two matrices.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.storage import write_tensors
from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, WEIGHTS_FILE
from vlora.errors import BadAdapter, BadConfig
from vlora.lora.peft_format import read_config
from vlora.lora.peft_settings import DESCRIPTION_AND_SELECTION, number_by_pattern, refuse_others
from vlora.run_folder import whole, writing

_SETTINGS = frozenset(
    (
        "peft_type",
        "r",
        "rank_pattern",
        "alpha",
        "alpha_pattern",
        "init_weights",
        "rank_dropout",
        "rank_dropout_scale",
        "module_dropout",
        "use_effective_conv2d",  # of convolutions, which are refused by their tensors
        "decompose_both",
        "decompose_factor",
    )
)
# peft_type -> the prefix of its tensors' names.
_PREFIXES = {"LOHA": "hada", "LOKR": "lokr"}
_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.(?P<prefix>hada|lokr)_(?P<part>w[12](_[ab])?)$")


class ConvertedLayer(NamedTuple):
    """error: relative Frobenius error of the layer's delta. norm: the delta's norm."""

    layer: str
    rank: int
    error: float
    norm: float


class Svd(NamedTuple):
    """A matrix u diag(s) vt; s is in descending order."""

    u: Tensor
    s: Tensor
    vt: Tensor


def convert(adapter: Path, out: Path, rank: int) -> list[ConvertedLayer]:
    """Write the nearest LoRA of a rank to the folder `out`, with the adapter's heads unchanged.

    Either all of `out` is written, or nothing.

    Raises:
        BadAdapter: The adapter cannot be read or converted.
        BadConfig: `out` exists.
    """
    if out.exists():
        raise BadConfig(f"{out} already exists; choose another folder with --out")
    config = read_config(adapter)
    layers = _read(adapter, config)
    tensors: dict[str, Tensor] = {}
    converted = []
    for module, parts in layers.items():
        found, values = _decomposed(adapter, config["peft_type"], module, parts, rank)
        scale = _scale(adapter, config, module)
        tensors[f"base_model.model.{module}.lora_A.weight"] = found.vt.float().contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = (found.u * (scale * found.s)).float().contiguous()
        norm, lost = float(values.norm()), float(values[rank:].norm())
        converted.append(ConvertedLayer(module, len(found.s), lost / norm if norm else 0.0, abs(scale) * norm))
    with writing(out), whole(out, durable=False) as part:
        part.mkdir(parents=True)
        (part / CONFIG_FILE).write_text(json.dumps(_lora_config(config, converted), indent=2))
        write_tensors(tensors, part / WEIGHTS_FILE)
        for name in (*HEAD_FILES, DOMAINS_FILE):
            if (adapter / name).exists():
                shutil.copyfile(adapter / name, part / name)
    return converted


def total_error(layers: Sequence[ConvertedLayer]) -> float:
    """Relative Frobenius error of all layers' deltas together."""
    norm = sum(layer.norm**2 for layer in layers) ** 0.5
    return sum((layer.error * layer.norm) ** 2 for layer in layers) ** 0.5 / norm if norm else 0.0


def loha(w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> Svd:
    """The decomposition of (w1_a w1_b) * (w2_a w2_b). Shapes: a [out, r], b [r, in]; s: [min(out, in, r^2)]."""
    left = torch.einsum("or,os->ors", w1_a, w2_a).flatten(1)
    right = torch.einsum("ri,si->rsi", w1_b, w2_b).flatten(0, 1)
    return _svd_of_product(left, right)


def lokr(first: Svd, second: Svd, rank: int) -> tuple[Svd, Tensor]:
    """The largest `rank` terms of the decomposition of the Kronecker product of two matrices, and all values of s."""
    values = torch.outer(first.s, second.s).flatten()
    s, order = values.sort(descending=True)
    rows, columns = order[:rank] // len(second.s), order[:rank] % len(second.s)
    u = torch.einsum("or,pr->opr", first.u[:, rows], second.u[:, columns]).flatten(0, 1)
    vt = torch.einsum("ri,rj->rij", first.vt[rows], second.vt[columns]).flatten(1)
    return Svd(u, s[:rank], vt), s


def _svd_of_product(a: Tensor, b: Tensor) -> Svd:
    """The decomposition of a b, for a [m, k] and b [k, n] with a small k."""
    left, lower = torch.linalg.qr(a)
    right, upper = torch.linalg.qr(b.t())
    u, s, vt = torch.linalg.svd(lower @ upper.t(), full_matrices=False)
    return Svd(left @ u, s, vt @ right.t())


def _factor(parts: Mapping[str, Tensor], name: str) -> Svd:
    """The decomposition of a matrix of LoKr, which is stored in whole or as a product."""
    if name in parts:
        return Svd(*torch.linalg.svd(parts[name], full_matrices=False))
    return _svd_of_product(parts[f"{name}_a"], parts[f"{name}_b"])


def _read(adapter: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The matrices of each layer in float64, by their names without the method's prefix."""
    prefix = _PREFIXES.get(str(config.get("peft_type")))
    if prefix is None:
        raise BadAdapter(f"{adapter}: peft_type is {config.get('peft_type')!r}; only LOHA and LOKR are converted")
    refuse_others(adapter, config, _SETTINGS | DESCRIPTION_AND_SELECTION)
    try:
        tensors = load_file(str(adapter / WEIGHTS_FILE))
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{adapter / WEIGHTS_FILE}: cannot be read as safetensors ({error})") from error
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None or match["prefix"] != prefix or tensor.ndim != 2:
            raise BadAdapter(f"{adapter}: tensor {name!r} {list(tensor.shape)} is not a matrix of a linear layer")
        if not tensor.isfinite().all():
            raise BadAdapter(f"{adapter}: tensor {name!r} contains values that are not finite (NaN or infinity)")
        layers.setdefault(match["module"], {})[match["part"]] = tensor.double()
    if not layers:
        raise BadAdapter(f"{adapter}: {WEIGHTS_FILE} contains no matrices of {config['peft_type']}")
    return dict(sorted(layers.items()))


def _decomposed(adapter: Path, kind: str, module: str, parts: Mapping[str, Tensor], rank: int) -> tuple[Svd, Tensor]:
    """The largest terms of a layer's delta before scaling, and all of its singular values."""
    try:
        if kind == "LOKR":
            return lokr(_factor(parts, "w1"), _factor(parts, "w2"), rank)
        found = loha(parts["w1_a"], parts["w1_b"], parts["w2_a"], parts["w2_b"])
    except (KeyError, RuntimeError) as error:
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in sorted(parts.items()))
        raise BadAdapter(f"{adapter}: the matrices of {module!r} do not form a delta: {shapes}") from error
    return Svd(found.u[:, :rank], found.s[:rank], found.vt[:rank]), found.s


def _scale(adapter: Path, config: Mapping[str, Any], module: str) -> float:
    rank = number_by_pattern(adapter, config, "r", "rank_pattern", (module,), 8)
    if rank <= 0:
        raise BadAdapter(f"{adapter}: r of {module!r} is {rank}; it must be positive")
    return number_by_pattern(adapter, config, "alpha", "alpha_pattern", (module,), 8) / rank


def _lora_config(config: Mapping[str, Any], layers: Sequence[ConvertedLayer]) -> dict[str, Any]:
    """A LoRA's configuration with the same description and selection; the scale is part of the factors."""
    most = max(layer.rank for layer in layers)
    others = {re.escape(layer.layer): layer.rank for layer in layers if layer.rank != most}
    return {
        **{name: value for name, value in config.items() if name in DESCRIPTION_AND_SELECTION},
        "peft_type": "LORA",
        "r": most,
        "lora_alpha": most,
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
    }
