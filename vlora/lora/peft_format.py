"""Reads the header of a LoRA adapter folder in PEFT's format: configuration, tensor shapes and task heads.

The factors are not read here. Features that cannot be served exactly are rejected by name. No tensor of the file is
silently ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from heads import HeadSpec, TaskHead, load_heads
from vlora.errors import BadAdapter
from vlora.lora.layout import run_bytes
from vlora.lora.legacy_names import resolve
from vlora.lora.peft_settings import invocation_of, refuse_unsupported, scale_of
from vlora.parallel.adapter_sharding import Blocks, Cut, FactorShape, ShardingKind, Side, plan_cut
from vlora.parallel.layer_sharding import LinearShard
from vlora.wording import json_errors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
HEAD_FILES = ("heads.json", "heads.safetensors")

# Layers that all adapters share.
_SHARED_LAYERS = {"lm_head": "output head", "embed_tokens": "token embedding"}
_NOT_ADAPTED = "; adapters on it are not supported"

_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")


@dataclasses.dataclass(frozen=True)
class SiteShape:
    """A linear layer of the base model that adapters may target.

    vision: whether it belongs to the vision tower or the projector. shard: the part on this rank; None is the whole
    layer.
    """

    d_in: int
    d_out: int
    vision: bool
    shard: LinearShard | None = None

    def cut(self, rank: int, blocks: Blocks | None, sharding: ShardingKind) -> Cut:
        """The part of an adapter's factors, of LoRA rank `rank`, that this process stores."""
        return plan_cut(rank, self.shard or LinearShard.whole(self.d_in, self.d_out), blocks, sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetHeader:
    """One adapted layer: its site in the model, the tensors of its factors in the file, their rank and scale.

    disk: the shapes of a and b in the file; block-diagonal factors are stored without their zeros. cut: the part of
    the factors that this process stores. merged: the part that merging needs, which is larger than `cut` if the factors
    are split over ranks.

    Thousands of adapters have hundreds of mostly equal headers each, so `_target_header` shares them.
    """

    site: str
    rank: int
    disk: tuple[tuple[int, ...], ...]
    blocks: Blocks | None
    cut: Cut
    merged: Cut
    vision: bool
    tensor_a: str
    tensor_b: str
    scale: float


@dataclasses.dataclass(frozen=True)
class AdapterHeader:
    """The properties of an adapter that are known before its factors are read.

    targets: in the order of the sites. invocation: the tokens from which on the adapter applies (aLoRA); empty if it
    applies to all tokens.
    """

    path: Path
    targets: tuple[TargetHeader, ...]
    heads: Mapping[str, TaskHead]
    invocation: tuple[int, ...] = ()

    def first_token(self, prompt_ids: tuple[int, ...]) -> int | None:
        """Index of the first prompt token that the adapter applies to; None if it applies to none.

        As PEFT's `calculate_alora_offsets`: the last place of the invocation tokens counts.
        """
        length = len(self.invocation)
        places = range(len(prompt_ids) - length, -1, -1)
        return next((at for at in places if prompt_ids[at : at + length] == self.invocation), None) if length else 0

    @functools.cached_property
    def rank(self) -> int:
        return max(target.rank for target in self.targets)

    @functools.cached_property
    def touches_vision(self) -> bool:
        return any(target.vision for target in self.targets)

    @functools.cached_property
    def has_blocks(self) -> bool:
        """Whether any factor is block-diagonal."""
        return any(target.blocks is not None for target in self.targets)

    @property
    def keeps_blocks(self) -> bool:
        """Whether all block-diagonal factors are stored as blocks, not in dense form."""
        return self.has_blocks and all(target.cut.densified is None for target in self.targets)

    @property
    def shapes(self) -> dict[str, FactorShape]:
        """The factors' shapes by site."""
        return {target.site: target.cut.shape for target in self.targets}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the factors in memory, as values of `dtype`."""
        return run_bytes(self.shapes, dtype)

    def has_same_content(self, other: AdapterHeader) -> bool:
        """Whether both have equal layers, ranks, scales, invocation tokens and head specifications."""
        return (self.targets, self.invocation, self._specs()) == (other.targets, other.invocation, other._specs())

    def _specs(self) -> dict[str, HeadSpec]:
        return {name: head.spec for name, head in self.heads.items()}


def read_header(
    path: Path, sites: Mapping[str, SiteShape], hidden_size: int, sharding: ShardingKind = "replicated"
) -> AdapterHeader:
    """Read an adapter folder and check it against the base model.

    Args:
        path: The adapter's folder.
        sites: The base model's adaptable layers, in order.
        hidden_size: The width of the base model's hidden states.
        sharding: Sharding of the dense factors on several ranks.

    Raises:
        BadAdapter: The adapter cannot be served; the message has the reason.
    """
    config = read_config(path)
    refuse_unsupported(path, config)
    shapes = _read_shapes(path / WEIGHTS_FILE)
    pairs: dict[str, dict[str, str]] = {}
    for tensor in shapes:
        match = _TENSOR.match(tensor)
        if match is None:
            shared = next((name for name in _SHARED_LAYERS if f".{name}." in tensor), None)
            if shared is not None:
                raise BadAdapter(f"{path}: tensor {tensor!r} belongs to the {_SHARED_LAYERS[shared]}{_NOT_ADAPTED}")
            raise BadAdapter(f"{path}: tensor {tensor!r} is not a LoRA factor of a linear layer; it is not supported")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise BadAdapter(f"{path}: {WEIGHTS_FILE} contains no LoRA factors")
    targets = tuple(_target(path, config, module, sides, shapes, sites) for module, sides in sorted(pairs.items()))
    seen: dict[str, str] = {}
    for target in targets:
        if target.site in seen:
            raise BadAdapter(
                f"{path}: {seen[target.site]!r} and {target.tensor_a!r} adapt the same layer {target.site!r}"
            )
        seen[target.site] = target.tensor_a
    by_site = {target.site: target for target in targets}
    ordered = tuple(by_site[site] for site in sites if site in by_site)
    header = AdapterHeader(path, ordered, _heads(path, hidden_size), invocation_of(path, config))
    if header.invocation and header.touches_vision:
        raise BadAdapter(
            f"{path}: it has alora_invocation_tokens and adapts the vision side, which is computed before any token; "
            "adapt layers of the language model only"
        )
    return header if sharding == "replicated" else split_over_ranks(header, sites)


def split_over_ranks(header: AdapterHeader, sites: Mapping[str, SiteShape]) -> AdapterHeader:
    """The same adapter with both factors of every layer split (S-LoRA), if the layer is split and its shape divides.

    Block-diagonal factors are not changed: they are cut along their blocks.
    """
    targets = tuple(
        dataclasses.replace(target, cut=sites[target.site].cut(target.rank, None, "slora"))
        if target.blocks is None
        else target
        for target in header.targets
    )
    return dataclasses.replace(header, targets=targets)


def _heads(path: Path, hidden_size: int) -> dict[str, TaskHead]:
    if not any((path / file).exists() for file in HEAD_FILES):
        return {}
    try:
        found = load_heads(path)
    except (ValueError, OSError, SafetensorError) as error:
        raise BadAdapter(f"{path}: cannot read its task heads: {error}") from error
    for head_name, head in found.items():
        if head.weight.shape[1] != hidden_size:
            raise BadAdapter(
                f"{path}: head {head_name!r} reads {head.weight.shape[1]} features, but the base model's hidden states "
                f"have {hidden_size}; the head was made for another model"
            )
    return found


def read_config(path: Path) -> dict[str, Any]:
    """An adapter's configuration, as stored in the folder. Raises BadAdapter if it is missing or malformed."""
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise BadAdapter(f"{path}: no {CONFIG_FILE}; an adapter is a folder in PEFT's format") from error
    except OSError as error:
        raise BadAdapter(f"{file}: cannot read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else json_errors.described(error)
        raise BadAdapter(f"{file}: is not JSON: {why}") from error
    if not isinstance(config, dict):
        raise BadAdapter(f"{file}: contains {type(config).__name__}; expected an object")
    return config


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if not file.exists():
        raise BadAdapter(
            f"{file.parent}: no {WEIGHTS_FILE}; pickled weights (.bin) are not supported, save as safetensors"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{file}: cannot be read as safetensors ({error}); the file may be truncated") from error


def _target(
    path: Path,
    config: Mapping[str, Any],
    module: str,
    sides: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    sites: Mapping[str, SiteShape],
) -> TargetHeader:
    for side in ("A", "B"):
        if side not in sides:
            raise BadAdapter(f"{path}: layer {module!r} has no lora_{side}; both factors are required")
    shape_a, shape_b = shapes[sides["A"]], shapes[sides["B"]]
    if len(shape_a) == len(shape_b) and shape_a[2:]:
        raise BadAdapter(
            f"{path}: module {module!r} is a convolution (Conv{len(shape_a) - 2}d, its lora_A has shape {shape_a}); "
            "adapters are supported on linear layers only; train this adapter with "
            f"exclude_modules=[{'.'.join(module.split('.')[-2:])!r}] in its LoraConfig"
        )
    site = resolve(module, sites)
    if site is None:
        shared = _SHARED_LAYERS.get(module.rpartition(".")[2])
        raise BadAdapter(
            f"{path}: the base model has no adaptable linear layer {module!r}; the adapter was made for another model"
            if shared is None
            else f"{path}: layer {module!r} is the {shared}{_NOT_ADAPTED}"
        )
    expected = sites[site]
    blocks = _blocks(path, config, module)
    # A block-diagonal factor is stored without its zeros, as vertically stacked blocks.
    cut_a = blocks.num if blocks is not None and blocks.side == "a" else 1
    cut_b = blocks.num if blocks is not None and blocks.side == "b" else 1
    if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1] * cut_b or shape_a[0] < 1:
        raise BadAdapter(
            f"{path}: factors of {module!r} have shapes {shape_a} and {shape_b}; expected [r, in{_per(cut_a)}] and "
            f"[out, r{_per(cut_b)}]"
        )
    if expected.d_in % cut_a:
        raise BadAdapter(
            f"{path}: {module!r} has {cut_a} blocks in its configuration, which do not divide the {expected.d_in} "
            "inputs of this base model's layer"
        )
    if (shape_a[1] * cut_a, shape_b[0]) != (expected.d_in, expected.d_out):
        raise BadAdapter(
            f"{path}: {module!r} maps {shape_a[1] * cut_a} to {shape_b[0]}, but this base model's layer maps "
            f"{expected.d_in} to {expected.d_out}; the adapter was made for another model"
        )
    rank = shape_a[0]
    if rank % (cut_a * cut_b) or shape_b[0] % cut_b:
        raise BadAdapter(
            f"{path}: {module!r} has rank {rank} and {shape_b[0]} outputs, which cannot be divided into its "
            f"{cut_a * cut_b} blocks"
        )
    scale = scale_of(path, config, (module, site), rank)
    return _target_header(site, expected, (shape_a, shape_b), blocks, sides["A"], sides["B"], scale)


@functools.lru_cache(maxsize=2**16)
def _target_header(
    site: str,
    expected: SiteShape,
    disk: tuple[tuple[int, ...], ...],
    blocks: Blocks | None,
    tensor_a: str,
    tensor_b: str,
    scale: float,
) -> TargetHeader:
    """Create a header, or return the shared one if an equal header exists."""
    rank = disk[0][0]
    cut = expected.cut(rank, blocks, "replicated")
    return TargetHeader(
        site=sys.intern(site),
        rank=rank,
        disk=disk,
        blocks=blocks,
        cut=cut,
        merged=cut,
        vision=expected.vision,
        tensor_a=sys.intern(tensor_a),
        tensor_b=sys.intern(tensor_b),
        scale=scale,
    )


def _per(count: int) -> str:
    return f" / {count}" if count > 1 else ""


def _blocks(path: Path, config: Mapping[str, Any], module: str) -> Blocks | None:
    """The block-diagonal factor of a layer, found as PEFT does: by names that are substrings of the layer's name.

    PEFT's help texts of the two lists contradict each other, so only the lists themselves count.
    """
    declared = config.get("use_bdlora")
    if not declared:
        return None
    count = declared.get("nblocks", 1) if isinstance(declared, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadAdapter(f"{path}: use_bdlora is {declared!r}; expected an object with nblocks of at least 1")
    leaf = module.rpartition(".")[2]
    sides: list[Side] = [
        side
        for side in ("a", "b")
        if any(str(name) in leaf for name in declared.get(f"target_modules_bd_{side}") or ())
    ]
    if len(sides) > 1:
        raise BadAdapter(f"{path}: use_bdlora names {leaf!r} both in target_modules_bd_a and target_modules_bd_b")
    return Blocks(sides[0], count) if sides and count > 1 else None
