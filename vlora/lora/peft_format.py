"""Reads the header of a LoRA adapter folder in PEFT's format: configuration, tensor shapes and task heads.

The factors are not read here. Features that cannot be served exactly are rejected by name. No tensor of the file is
silently ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from heads import TaskHead, load_heads
from vlora.adapter_files import (
    CONFIG_FILE,
    DOMAINS_FILE,
    HEAD_FILES,
    WEIGHTS_FILE,
    content_hash,
    is_pointer,
    other_weights,
    why_unreadable,
)
from vlora.errors import BadAdapter, listed
from vlora.lora.layout import run_bytes
from vlora.lora.peft_settings import fused_sites, invocation_of, refuse_unsupported
from vlora.lora.peft_target import (
    ROWS,
    SHARED_LAYERS,
    Part,
    SiteShape,
    StoredLayer,
    TargetHeader,
    read_target,
    with_tied_tokens,
)
from vlora.parallel.adapter_sharding import FactorShape, ShardingKind
from vlora.types.composition import name_problem
from vlora.types.domain import DomainSummary
from vlora.wording import json_errors

# In names of tensors that were saved while the model was wrapped: no layer of a model has these names.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NAMED = re.compile(r"(\.lora_(?:embedding_)?[AB])\.(?!weight$|bias$)\w+(?=\.(?:weight|bias)$|$)")
_TENSOR = re.compile(
    r"^base_model\.model\.(?P<module>.+?)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector|(base_layer\.)?bias"
    r"|lora_embedding_A|lora_embedding_B|(base_layer\.)?weight|ia3_l|(token_adapter\.)?trainable_tokens_delta)$"
)

# Tensors of a layer with a row per output; so has IA3's vector, unless it is over inputs.
_BY_OUTPUT = frozenset(("lora_B.weight", *ROWS))


@dataclasses.dataclass(frozen=True)
class AdapterHeader:
    """The properties of an adapter that are known before its factors are read.

    targets: in the order of the sites. invocation: the tokens from which on the adapter applies (aLoRA); empty if it
    applies to all tokens. version: the content hash that the folder must have when it is read; empty: any. domains: as
    declared by the folder, else one for each head.
    """

    path: Path
    targets: tuple[TargetHeader, ...]
    heads: Mapping[str, TaskHead]
    invocation: tuple[int, ...] = ()
    version: str = ""
    domains: tuple[DomainSummary, ...] = ()

    def first_token(self, prompt_ids: tuple[int, ...]) -> int | None:
        """Index of the first prompt token that the adapter applies to; None if it applies to none."""
        return last_place(prompt_ids, self.invocation) if self.invocation else 0

    @functools.cached_property
    def rank(self) -> int:
        return max(target.rank for target in self.targets)

    @functools.cached_property
    def touches_vision(self) -> bool:
        return any(target.vision for target in self.targets)

    @functools.cached_property
    def has_blocks(self) -> bool:
        return any(target.blocks is not None for target in self.targets)

    @property
    def keeps_blocks(self) -> bool:
        """Whether all block-diagonal factors are stored as blocks, not in dense form."""
        return self.has_blocks and all(target.cut.densified is None for target in self.targets)

    @property
    def shapes(self) -> dict[str, FactorShape]:
        return {target.site: target.cut.shape for target in self.targets}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the factors in memory, as values of `dtype`."""
        return run_bytes(self.shapes, dtype)

    def expecting(self, version: str) -> AdapterHeader:
        """The same header, of a folder that must have this content hash when it is read."""
        return dataclasses.replace(self, version=version)

    def has_same_content(self, other: AdapterHeader) -> bool:
        """Whether both have equal layers, ranks, scales, invocation tokens, head specifications and domains."""
        return self._content() == other._content()

    def _content(self) -> tuple[object, ...]:
        specs = {name: head.spec for name, head in self.heads.items()}
        return self.targets, self.invocation, specs, self.domains


def read_header(
    path: Path, sites: Mapping[str, SiteShape], hidden_size: int, sharding: ShardingKind = "replicated"
) -> AdapterHeader:
    """Read an adapter folder and check it against the base model.

    Args:
        sites: The base model's adaptable layers, in order.
        hidden_size: The width of the base model's hidden states.
        sharding: Sharding of the dense factors on several ranks.

    Raises:
        BadAdapter: The adapter cannot be served; the message has the reason.
    """
    config = read_config(path)
    refuse_unsupported(path, config)
    shapes = _read_shapes(path / WEIGHTS_FILE)
    layers: dict[str, dict[str, str]] = {}
    for tensor in shapes:
        match = _TENSOR.match(_plain_name(tensor))
        if match is None:
            shared = next((name for name in SHARED_LAYERS if f".{name}." in tensor), None)
            if shared is not None:
                raise BadAdapter(
                    f"{path}: tensor {tensor!r} belongs to the {SHARED_LAYERS[shared]}, which does not support it"
                )
            raise BadAdapter(f"{path}: tensor {tensor!r} is not a LoRA factor of a linear layer; it is not supported")
        part = "bias" if match["part"] == "base_layer.bias" else match["part"].removeprefix("token_adapter.")
        if (twin := layers.setdefault(match["module"], {}).setdefault(part, tensor)) != tensor:
            raise BadAdapter(f"{path}: {twin!r} and {tensor!r} are the same tensor of {match['module']!r}")
    if not layers:
        raise BadAdapter(f"{path}: {WEIGHTS_FILE} contains no LoRA factors")
    stored = [
        target
        for module, parts in sorted(layers.items())
        for target in _read_targets(StoredLayer(path, config, module, parts, shapes, sites))
    ]
    if config.get("trainable_token_indices") is not None and not any(target.is_of_tokens for target in stored):
        raise BadAdapter(f"{path}: trainable_token_indices is set, but {WEIGHTS_FILE} has no weights of tokens")
    targets = tuple(with_tied_tokens(stored, sites))
    seen: dict[str, str] = {}
    for target in targets:
        if target.site in seen:
            raise BadAdapter(
                f"{path}: {seen[target.site]!r} and {target.first_tensor!r} adapt the same layer {target.site!r}"
            )
        seen[target.site] = target.first_tensor
    by_site = {target.site: target for target in targets}
    ordered = tuple(by_site[site] for site in sites if site in by_site)
    heads = _heads(path, hidden_size)
    header = AdapterHeader(path, ordered, heads, invocation_of(path, config), domains=_domains(path, heads))
    if header.invocation and header.touches_vision:
        raise BadAdapter(
            f"{path}: it has alora_invocation_tokens and adapts the vision side, which is computed before any token; "
            "adapt layers of the language model only"
        )
    if header.invocation and not all(target.is_plain for target in ordered):
        raise BadAdapter(
            f"{path}: it has alora_invocation_tokens beside DoRA, biases, modules_to_save or an adapted output head or "
            "embedding; activated adapters may have plain LoRA only"
        )
    return header if sharding == "replicated" else split_over_ranks(header, sites)


def read_again(
    name: str, before: AdapterHeader, sites: Mapping[str, SiteShape], hidden_size: int, sharding: ShardingKind
) -> AdapterHeader:
    """The header of a registered folder, whose files must stay as they are now until the factors are read.

    Raises BadAdapter if layers, ranks or heads have changed, or as `read_header`.
    """
    try:
        version = before.version or content_hash(before.path)
    except OSError as error:
        raise BadAdapter(f"{before.path}: cannot be read: {error}") from error
    header = read_header(before.path, sites, hidden_size, sharding)
    if not header.has_same_content(before):
        raise BadAdapter(
            f"{header.path}: its layers, ranks or heads changed since it was registered as {name!r}; load it again"
        )
    return header.expecting(version)


def split_over_ranks(header: AdapterHeader, sites: Mapping[str, SiteShape]) -> AdapterHeader:
    """The same adapter with both factors of every layer split (S-LoRA), if the layer is split and its shape divides.

    Block-diagonal factors are not changed: they are cut along their blocks. Nor are factors with further rows, nor
    what is not a pair of factors: whole weights, rows of tokens, IA3 factors.
    """
    targets = tuple(
        dataclasses.replace(target, cut=sites[target.site].cut(target.rank, None, "slora"))
        if target.cut.shape.kind == "dense" and not target.cut.shape.rows
        else target
        for target in header.targets
    )
    return dataclasses.replace(header, targets=targets)


def registered_content(header: AdapterHeader, weights: Path) -> str:
    """The hash of a folder's content with these weights. Raises BadAdapter if the header names another one."""
    found = content_hash(header.path, weights)
    if header.version not in ("", found):
        raise BadAdapter(
            f"{header.path}: its content is {found}, but {header.version} was registered; copy the files of the "
            "registered content there, or load the adapter again to serve the new content"
        )
    return found


def _plain_name(tensor: str) -> str:
    """A tensor's name without those of modules around the model and its layers, nor PEFT's of the adapter."""
    return _NAMED.sub(r"\1", _WRAPPERS.sub("", tensor).removeprefix("module."))


def last_place(prompt_ids: tuple[int, ...], invocation: tuple[int, ...]) -> int | None:
    """The last index at which invocation tokens begin, as PEFT's `calculate_alora_offsets`; None without them."""
    places = range(len(prompt_ids) - len(invocation), -1, -1)
    return next((at for at in places if prompt_ids[at : at + len(invocation)] == invocation), None)


def _read_targets(layer: StoredLayer) -> tuple[TargetHeader, ...]:
    """Check one layer of an adapter's file. Raises BadAdapter with the reason if it cannot be served.

    Qwen-VL's published code computes queries, keys and values by one layer, `c_attn`. Its outputs are those of q_proj,
    k_proj and v_proj, one below the other, so each of these gets the whole A and its own rows of B, exactly.

    Returns:
        A header for each of the base model's layers that it is.
    """
    path, config, module, parts, shapes, sites = layer
    names = fused_sites(module, sites)
    if not names:
        return (read_target(layer),)
    ends = tuple(itertools.accumulate(sites[name].d_out for name in names))
    by_output = {
        parts[part] for part in parts if part in _BY_OUTPUT or (part == "ia3_l" and shapes[parts[part]][-1:] == (1,))
    }
    for tensor in by_output:
        if shapes[tensor][:1] != ends[-1:]:
            raise BadAdapter(
                f"{path}: tensor {tensor!r} has shape {shapes[tensor]}, but this base model's {module!r} has "
                f"{ends[-1]} outputs; the adapter was made for another model"
            )
    headers: list[TargetHeader] = []
    for name, start, stop in zip(names, (0, *ends), ends, strict=False):
        own = {
            tensor: (stop - start, *shapes[tensor][1:]) if tensor in by_output else shapes[tensor]
            for tensor in parts.values()
        }
        site = dataclasses.replace(sites[name], part=Part(name, start, stop))
        header = read_target(StoredLayer(path, config, module, parts, own, {module: site}))
        if header.blocks is not None:
            raise BadAdapter(f"{path}: use_bdlora is not supported for {module!r}, which is several layers here")
        headers.append(header)
    return tuple(headers)


def _heads(path: Path, hidden_size: int) -> dict[str, TaskHead]:
    if not any((path / file).exists() for file in HEAD_FILES):
        return {}
    try:
        found = load_heads(path)
    except (ValueError, OSError, SafetensorError) as error:
        raise BadAdapter(f"{path}: cannot read its task heads: {error}") from error
    for head_name, head in found.items():
        if head.spec.hidden_size != hidden_size:
            raise BadAdapter(
                f"{path}: head {head_name!r} reads {head.spec.hidden_size} features, but the base model's hidden "
                f"states have {hidden_size}; the head was made for another model"
            )
    return found


def _domains(path: Path, heads: Mapping[str, TaskHead]) -> tuple[DomainSummary, ...]:
    """The declared domains; in a folder without a declaration, each head is a domain."""
    file = path / DOMAINS_FILE
    if not file.exists():
        specs = [head.spec for head in heads.values()]
        return tuple(DomainSummary(name=one.name, question=one.prompt, head=one.name, answer="head") for one in specs)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[DomainSummary, ...]]).get("domains", ())
    except OSError as error:
        raise BadAdapter(f"{file}: cannot read: {why_unreadable(error)}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadAdapter(f"{file}: {error}") from error
    for domain in found:
        if (problem := name_problem(domain.name)) is not None:
            raise BadAdapter(f"{file}: {problem.replace('adapter', 'domain', 1)}")
        if domain.head not in (None, *heads) or (domain.answer == "head" and domain.head is None):
            raise BadAdapter(f"{file}: domain {domain.name!r} has head {domain.head!r}; its heads: {listed(heads)}")
    if len({domain.name for domain in found}) < len(found):
        raise BadAdapter(f"{file}: two domains have the same name")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """An adapter's configuration, as stored in the folder. Raises BadAdapter if it is missing or malformed."""
    file = path / CONFIG_FILE
    try:
        check_file(file)
        config = json.loads(file.read_text())
        problem = other_weights(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadAdapter(f"{path}: no {CONFIG_FILE}; {_without_config(path)}") from error
    except OSError as error:
        raise BadAdapter(f"{file}: cannot read: {why_unreadable(error)}") from error
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else json_errors.described(error)
        raise BadAdapter(f"{file}: is not JSON: {why}") from error
    if not isinstance(config, dict):
        raise BadAdapter(f"{file}: contains {type(config).__name__}; expected an object")
    if problem:
        raise BadAdapter(f"{path}: {problem}")
    return config


def _without_config(path: Path) -> str:
    """The reason why a path is not an adapter folder."""
    if not path.is_dir():
        return "it is a file; give the path of its folder" if path.exists() else "there is no such folder"
    if nested := sorted(file.parent.name for file in path.glob(f"*/{CONFIG_FILE}")):
        return f"it is a folder of adapters: give the path of one of them ({listed(nested)})"
    if any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return "it has the weights of a whole model: serve it with --model, or save the adapter alone"
    return "an adapter is a folder in PEFT's format"


def check_file(file: Path) -> None:
    """Raises BadAdapter for what is no file, or stands for another one, which is missing. Raises OSError."""
    if not file.exists():
        if file.is_symlink():
            raise BadAdapter(f"{file}: is a link to {file.readlink()}, which does not exist")
    elif not file.is_file():
        raise BadAdapter(f"{file}: is not a file")
    if is_pointer(file):
        raise BadAdapter(f"{file}: is a pointer of Git LFS, not the file; run `git lfs pull` in its repository")


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        check_file(file)
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadAdapter(
            f"{file.parent}: no {WEIGHTS_FILE}; pickled weights (.bin) are not supported, save as safetensors"
        ) from error
    except OSError as error:
        raise BadAdapter(f"{file}: cannot read: {why_unreadable(error)}") from error
    except SafetensorError as error:
        raise BadAdapter(f"{file}: cannot be read as safetensors ({error}); the file may be truncated") from error
