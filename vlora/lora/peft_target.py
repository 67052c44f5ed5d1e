"""One layer of an adapter in PEFT's format: its tensors in the file, checked against the base model's layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlora.errors import BadAdapter
from vlora.lora.peft_settings import resolve, scale_of, tokens_of
from vlora.parallel.adapter_sharding import Blocks, Cut, FactorKind, RowKind, ShardingKind, Side, plan_cut
from vlora.parallel.layer_sharding import ROW_PARALLEL, LinearShard

# Layers that all adapters share.
SHARED_LAYERS = {"lm_head": "output head", "embed_tokens": "token embedding"}

TOKENS = "trainable_tokens_delta"  # PEFT's name; it has weights, not their changes

# Tensors of a layer with a value per output, and the settings that they belong to.
ROWS = {"lora_magnitude_vector": "use_dora", "lora_B.bias": "lora_bias", "bias": "bias"}


class Part(NamedTuple):
    """The rows [start, stop) of a layer in an adapter's file, which are the outputs of layer `site` of the model."""

    site: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class SiteShape:
    """A linear layer of the base model that adapters may target.

    vision: whether it belongs to the vision tower or the projector. shard: the part on this rank; None is the whole
    layer. own: the output head or the token embedding, where each row of a batch has a weight of its own. tied: the
    layer that shares this one's weight. part: set while a layer is read that is several layers of the model.
    """

    d_in: int
    d_out: int
    vision: bool
    shard: LinearShard | None = None
    own: bool = False
    tied: str | None = None
    part: Part | None = None

    def cut(self, rank: int, blocks: Blocks | None, sharding: ShardingKind) -> Cut:
        """The part of an adapter's factors, of LoRA rank `rank`, that this process stores."""
        return plan_cut(rank, self.shard or LinearShard.whole(self.d_in, self.d_out), blocks, sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetHeader:
    """One adapted layer: its site in the model, the tensors of its factors in the file, their rank and scale.

    disk: the shapes of a and b in the file; block-diagonal factors are stored without their zeros. cut: the part of
    the factors that this process stores. merged: the part that merging needs, which is larger than `cut` if the factors
    are split over ranks. magnitude: the tensor of DoRA's norms, or None. biases: the tensors of trained biases, of
    lora_B (`.lora_B.bias`) or in place of the layer's.

    A layer with a trained bias only, or with IA3's vector, has rank 0, and its tensor_a and tensor_b are empty. A layer
    that is replaced, or some of its tokens, has its weight in tensor_a. is_transposed: both are stored transposed
    (embeddings). base_copy: a tensor that must equal W0. own and part: as in `SiteShape`.

    Thousands of adapters have hundreds of mostly equal headers each, so `_target_header` shares them.
    """

    site: str
    rank: int
    disk: tuple[tuple[int, ...], ...]
    cut: Cut
    merged: Cut
    vision: bool
    own: bool
    part: Part | None
    scale: float = 0.0
    blocks: Blocks | None = None
    tensor_a: str = ""
    tensor_b: str = ""
    magnitude: str | None = None
    biases: tuple[str, ...] = ()
    vector: str | None = None
    is_transposed: bool = False
    base_copy: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the layer is a linear layer of the model with factors only."""
        shape = self.cut.shape
        return not (shape.rows or shape.kind == "replaced" or self.own)

    @property
    def is_of_tokens(self) -> bool:
        return self.cut.shape.kind == "tokens"

    @property
    def first_tensor(self) -> str:
        return self.tensor_a or self.vector or self.biases[0]


class StoredLayer(NamedTuple):
    """One layer in an adapter's file.

    Attributes:
        shapes: The shapes of all tensors in the file.
    """

    path: Path
    config: Mapping[str, Any]
    module: str
    parts: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    sites: Mapping[str, SiteShape]


def read_target(layer: StoredLayer) -> TargetHeader:
    """Check one layer of an adapter. Raises BadAdapter with the reason if it cannot be served."""
    path, config, module, parts, shapes, sites = layer
    if TOKENS in parts or config.get("peft_type") == "TRAINABLE_TOKENS":
        return _of_tokens(layer)
    if "weight" not in parts and ("ia3_l" in parts) != (config.get("peft_type") == "IA3"):
        raise BadAdapter(
            f"{path}: peft_type is {config.get('peft_type')!r}, but layer {module!r} has {', '.join(sorted(parts))}"
        )
    if "ia3_l" in parts:
        return _ia3(layer)
    if "weight" in parts:
        return _replaced(layer)
    if "lora_embedding_A" in parts or "lora_embedding_B" in parts:
        return _embedding(layer)
    if set(parts) == {"bias"}:
        if resolve(module, sites) is None:
            raise BadAdapter(
                f"{path}: bias = {config.get('bias')!r} has trained the bias of {module!r}, which is no linear layer "
                "that adapters may target; it is not supported"
            )
        site = _site(path, module, sites)
        disk, blocks, scale = None, None, 0.0
    else:
        for part in ("lora_A", "lora_B"):
            if f"{part}.weight" not in parts:
                raise BadAdapter(f"{path}: layer {module!r} has no {part}; both factors are required")
        disk = shapes[parts["lora_A.weight"]], shapes[parts["lora_B.weight"]]
        if len(disk[0]) == len(disk[1]) and disk[0][2:]:
            raise BadAdapter(
                f"{path}: module {module!r} is a convolution (Conv{len(disk[0]) - 2}d, its lora_A has shape "
                f"{disk[0]}); adapters are supported on linear layers only; train this adapter with "
                f"exclude_modules=[{'.'.join(module.split('.')[-2:])!r}] in its LoraConfig"
            )
        site = _site(path, module, sites)
        blocks = _blocks(path, config, module)
        _check_factors(path, module, disk, sites[site], blocks)
        scale = scale_of(path, config, (module, site), disk[0][0])
    _check_rows(layer, sites[site], blocks)
    allowed = {"lora_A.weight", "lora_B.weight"} | ({"base_layer.weight"} if sites[site].own else set(ROWS))
    others = sorted(set(parts) - allowed)
    if others or (sites[site].own and blocks is not None):
        raise BadAdapter(f"{path}: layer {module!r} has {', '.join(others) or 'blocks'}, which is not supported there")
    _check_own(path, config, module, sites[site])
    magnitude = parts.get("lora_magnitude_vector")
    biases = tuple(parts[part] for part in ("lora_B.bias", "bias") if part in parts)
    rows: dict[RowKind, bool] = {"scale": magnitude is not None, "shift": bool(biases)}
    return _target_header(
        site,
        sites[site],
        disk,
        rows=tuple(row for row in rows if rows[row]),
        scale=scale,
        blocks=blocks,
        tensor_a=parts.get("lora_A.weight", ""),
        tensor_b=parts.get("lora_B.weight", ""),
        magnitude=magnitude,
        biases=biases,
        base_copy=parts.get("base_layer.weight"),
    )


def _ia3(layer: StoredLayer) -> TargetHeader:
    """A layer of IA3: a vector over its outputs [d_out, 1] or inputs [1, d_in], as PEFT stores it."""
    path, _, module, parts, shapes, sites = layer
    site = _site(path, module, sites)
    expected, shape = sites[site], shapes[parts["ia3_l"]]
    row: RowKind
    if shape == (expected.d_out, 1):
        row = "gain"
    elif shape == (1, expected.d_in):
        row = "input"
    else:
        raise BadAdapter(
            f"{path}: ia3_l of {module!r} has shape {shape}, but this base model's layer maps {expected.d_in} to "
            f"{expected.d_out}; the adapter was made for another model"
        )
    leaf = site.rpartition(".")[2]
    if expected.own or len(parts) > 1 or (row == "input" and (expected.vision or leaf not in ROW_PARALLEL)):
        raise BadAdapter(
            f"{path}: IA3 on the {row if row == 'input' else 'output'} of {module!r} is not supported; "
            f"feedforward_modules may be {' and '.join(ROW_PARALLEL)} of the language model"
        )
    if expected.shard is not None and expected.shard.by_rows:
        raise BadAdapter(f"{path}: IA3 on {module!r} is not supported with tensor_parallel = {expected.shard.size}")
    return _target_header(site, expected, rows=(row,), vector=parts["ia3_l"])


def _of_tokens(layer: StoredLayer) -> TargetHeader:
    """The output head or the token embedding with weights of its own for some tokens."""
    path, config, module, parts, shapes, sites = layer
    if set(parts) != {TOKENS}:
        raise BadAdapter(
            f"{path}: layer {module!r} has {', '.join(sorted(parts))}; trainable tokens must be alone there"
        )
    site = _site(path, module, sites)
    expected, shape, tokens = sites[site], shapes[parts[TOKENS]], tokens_of(path, config, module)
    if not expected.own:
        raise BadAdapter(
            f"{path}: {parts[TOKENS]!r} is not supported: trainable tokens are those of the token embedding and the "
            "output head"
        )
    if shape != (len(tokens), expected.d_in) or max(tokens) >= expected.d_out:
        raise BadAdapter(
            f"{path}: {parts[TOKENS]!r} has shape {shape} for {len(tokens)} tokens up to {max(tokens)}, but this base "
            f"model has {expected.d_out} tokens of width {expected.d_in}; the adapter was made for another model or "
            "vocabulary"
        )
    disk = (shape, (expected.d_out, 0))
    return _target_header(site, expected, disk, kind="tokens", tokens=tokens, tensor_a=parts[TOKENS])


def with_tied_tokens(targets: Sequence[TargetHeader], sites: Mapping[str, SiteShape]) -> Iterator[TargetHeader]:
    """The layers of an adapter, and those that share a weight with its tokens, as PEFT ties them.

    A tied layer with tokens of its own in the file is not changed otherwise.
    """
    yield from targets
    with_tokens = {target.site for target in targets if target.is_of_tokens}
    for target in targets:
        tied = sites[target.site].tied
        if target.is_of_tokens and tied is not None and tied not in with_tokens:
            yield dataclasses.replace(target, site=tied)


def _replaced(layer: StoredLayer) -> TargetHeader:
    """A layer with a weight of its own. Raises BadAdapter if the layer cannot have one."""
    path, config, module, parts, shapes, sites = layer
    site = _known(path, module, sites)
    if site is None or not (sites[site].own or sites[site].vision):
        raise BadAdapter(
            f"{path}: tensor {parts['weight']!r} (modules_to_save) is not supported: {module!r} is neither the output "
            "head, the token embedding nor a linear layer of the vision side"
        )
    expected = sites[site]
    _check_own(path, config, module, expected)
    if others := sorted(set(parts) - ({"weight"} if expected.own else {"weight", "bias"})):
        raise BadAdapter(f"{path}: modules_to_save has {module!r} with {others[0]} beside its weight; not supported")
    shape = shapes[parts["weight"]]
    if shape != (expected.d_out, expected.d_in):
        raise BadAdapter(
            f"{path}: the weight of {module!r} has shape {shape}, but this base model's has "
            f"{(expected.d_out, expected.d_in)}; the adapter was made for another model or vocabulary"
        )
    rows: tuple[RowKind, ...]
    rows, biases = (("shift",), (parts["bias"],)) if "bias" in parts else ((), ())
    disk = (shape, (expected.d_out, 0))
    return _target_header(site, expected, disk, kind="replaced", rows=rows, tensor_a=parts["weight"], biases=biases)


def _embedding(layer: StoredLayer) -> TargetHeader:
    """LoRA on the token embedding: delta = (s B A)^T, with A [r, vocabulary] and B [hidden, r]."""
    path, config, module, parts, shapes, sites = layer
    sides = ("lora_embedding_B", "lora_embedding_A")
    site = _known(path, module, sites)
    fits = set(sides) <= set(parts) <= {*sides, "base_layer.weight"}
    if site is None or not sites[site].own or not fits:
        raise BadAdapter(
            f"{path}: layer {module!r} has {', '.join(sorted(parts))}; supported is plain LoRA of the token embedding"
        )
    _check_own(path, config, module, sites[site])
    disk = tuple(shapes[parts[side]][::-1] for side in sides)
    _check_factors(path, module, disk, sites[site], None)
    return _target_header(
        site,
        sites[site],
        disk,
        scale=scale_of(path, config, (module, site), disk[0][0]),
        tensor_a=parts["lora_embedding_B"],
        tensor_b=parts["lora_embedding_A"],
        is_transposed=True,
        base_copy=parts.get("base_layer.weight"),
    )


def _check_own(path: Path, config: Mapping[str, Any], module: str, expected: SiteShape) -> None:
    if expected.own and config.get("ensure_weight_tying"):
        raise BadAdapter(f"{path}: ensure_weight_tying is not supported for an adapter that changes {module!r}")


def _site(path: Path, module: str, sites: Mapping[str, SiteShape]) -> str:
    """The base model's name of a layer. Raises BadAdapter if it is not adaptable."""
    site = _known(path, module, sites)
    if site is None:
        raise BadAdapter(
            f"{path}: the base model has no adaptable linear layer {module!r}; the adapter was made for another model"
        )
    return site


def _known(path: Path, module: str, sites: Mapping[str, SiteShape]) -> str | None:
    """As `resolve`. Raises BadAdapter for an output head or token embedding under a name that this model never had."""
    site, leaf = resolve(module, sites), module.rpartition(".")[2]
    current = next((name for name in sites if name.rpartition(".")[2] == leaf and leaf in SHARED_LAYERS), None)
    if site is None and current is not None:
        raise BadAdapter(
            f"{path}: the base model has no layer {module!r}, its {SHARED_LAYERS[leaf]} is {current!r}; rename the "
            "adapter's tensors if it was made for this model"
        )
    return site


def _check_factors(
    path: Path, module: str, disk: tuple[tuple[int, ...], ...], expected: SiteShape, blocks: Blocks | None
) -> None:
    """Raises BadAdapter if a layer's factors do not fit each other, their blocks or the base model's layer."""
    shape_a, shape_b = disk
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


def _check_rows(layer: StoredLayer, expected: SiteShape, blocks: Blocks | None) -> None:
    """Raises BadAdapter if a layer's magnitudes and biases do not fit the configuration or cannot be served."""
    path, config, module, parts, shapes, _ = layer
    for part, setting in (("lora_magnitude_vector", "use_dora"), ("lora_B.bias", "lora_bias")):
        if "lora_B.weight" in parts and bool(config.get(setting)) != (part in parts):
            raise BadAdapter(
                f"{path}: {setting} is {config.get(setting)!r} in its configuration, but layer {module!r} has "
                f"{'a' if part in parts else 'no'} {part}"
            )
    if "bias" in parts and config.get("bias") in (None, "none"):
        raise BadAdapter(f"{path}: bias is 'none' in its configuration, but layer {module!r} has a bias")
    for part, setting in ROWS.items():
        if part not in parts:
            continue
        if shapes[parts[part]] != (expected.d_out,):
            raise BadAdapter(
                f"{path}: {part} of {module!r} has shape {shapes[parts[part]]}, but this base model's layer has "
                f"{expected.d_out} outputs"
            )
        if blocks is not None:
            raise BadAdapter(f"{path}: {setting} together with use_bdlora is not supported ({module!r})")
        if expected.shard is not None and expected.shard.by_rows:
            raise BadAdapter(
                f"{path}: {setting} is not supported for {module!r} with tensor_parallel = {expected.shard.size}, "
                "because each rank has a part of the layer's inputs; serve it with tensor_parallel = 1, or train it "
                f"with exclude_modules=[{module.rpartition('.')[2]!r}] in its LoraConfig"
            )


@functools.lru_cache(maxsize=2**16)
def _target_header(
    site: str,
    expected: SiteShape,
    disk: tuple[tuple[int, ...], ...] | None = None,
    *,
    kind: FactorKind | None = None,
    tokens: tuple[int, ...] = (),
    rows: tuple[RowKind, ...] = (),
    **fields: Any,
) -> TargetHeader:
    """Create a header, or return the shared one if an equal header exists.

    Args:
        disk: None without factors.
        kind: Of a layer with weights of its own, which has no factors; None for LoRA.
        rows: As in `FactorShape`.
        fields: Of the header.
    """
    disk = disk or ((0, expected.d_in), (expected.d_out, 0))
    rank = disk[0][0] if kind is None else 0
    cut = expected.cut(rank, fields.get("blocks"), "replicated")
    cut = dataclasses.replace(cut, shape=cut.shape._replace(kind=kind or cut.shape.kind, rows=rows, tokens=tokens))
    part, vision, own = expected.part, expected.vision, expected.own
    site = site if part is None else part.site
    return TargetHeader(
        site=site, rank=rank, disk=disk, cut=cut, merged=cut, vision=vision, own=own, part=part, **fields
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
