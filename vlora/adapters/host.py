"""An adapter in host memory: tensors read, checked and brought to the form the engine uses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from heads import TaskHead, load_heads
from vlora.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, AdapterHeader, SiteShape
from vlora.errors import BadAdapter

_HEAD_FILES = ("heads.json", "heads.safetensors")


class HostFactors(NamedTuple):
    """One layer's factors: a [r, d_in] and bt [r, d_out], scaling folded into bt. delta = (x a^T) bt."""

    a: torch.Tensor
    bt: torch.Tensor


@dataclasses.dataclass(frozen=True)
class HostAdapter:
    """version: hash of the folder's content; reloading a name with other content is another version."""

    name: str
    version: str
    factors: Mapping[str, HostFactors]
    heads: Mapping[str, TaskHead]
    rank: int
    touches_vision: bool

    @property
    def key(self) -> str:
        """What every cache and table on the device is keyed by: never the name alone."""
        return f"{self.name}@{self.version}"


def load_adapter(
    name: str, header: AdapterHeader, sites: Mapping[str, SiteShape], dtype: torch.dtype, hidden_size: int
) -> HostAdapter:
    """Read an adapter's tensors: finite check, scaling folded in float32, cast to the model's dtype.

    Raises BadAdapter for values that are not finite and for heads that do not fit the model.
    """
    factors: dict[str, HostFactors] = {}
    file = header.path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as tensors:
            for target in header.targets:
                a = tensors.get_tensor(target.tensor_a)
                bt = (tensors.get_tensor(target.tensor_b).float() * target.scale).t()
                for tensor, label in ((a, target.tensor_a), (bt, target.tensor_b)):
                    if not torch.isfinite(tensor).all():
                        raise BadAdapter(f"{file}: tensor {label!r} holds values that are not finite (NaN or infinity)")
                factors[target.site] = HostFactors(a.to(dtype).contiguous(), bt.to(dtype).contiguous())
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{file}: cannot be read as safetensors ({error})") from error
    return HostAdapter(
        name=name,
        version=_content_hash(header.path),
        factors=factors,
        heads=_read_heads(header.path, hidden_size),
        rank=header.rank,
        touches_vision=any(sites[site].vision for site in factors),
    )


def _read_heads(path: Path, hidden_size: int) -> dict[str, TaskHead]:
    if not any((path / file).exists() for file in _HEAD_FILES):
        return {}
    try:
        found = load_heads(path)
    except (ValueError, OSError, SafetensorError) as error:
        raise BadAdapter(f"{path}: its task heads cannot be read: {error}") from error
    for head_name, head in found.items():
        if head.weight.shape[1] != hidden_size:
            raise BadAdapter(
                f"{path}: head {head_name!r} reads {head.weight.shape[1]} features, but the base model's hidden states "
                f"have {hidden_size}; the head was made for another model"
            )
    return found


def _content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE, *_HEAD_FILES):
        file = path / name
        if file.exists():
            digest.update(name.encode())
            with file.open("rb") as stream:
                while piece := stream.read(2**20):
                    digest.update(piece)
    return digest.hexdigest()
