"""Checkpoints with weights in four or eight bits by groups of inputs, of GPTQ, AWQ, and compressed-tensors (packed).

Each linear layer of the language model has several tensors in place of its weight, here for d_out x d_in and p values
in an int32:

    gptq    qweight [d_in / p, d_out], scales [groups, d_out], qzeros [groups, d_out / p], g_idx [d_in]
    awq     qweight [d_in, d_out / p], scales [groups, d_out], qzeros [groups, d_out / p]
    packed  weight_packed [d_out, d_in / p], weight_scale [d_out, groups], and with offsets weight_zero_point
            [d_out / p, groups]

The first value of an int32 has its lowest bits, except that AWQ interleaves eight outputs. A weight is
(value - zero) * scale. GPTQ stores its zeros minus one, unless `checkpoint_format` is gptq_v2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from atmm.grouped import GROUPS, Grouped
from atmm.quantized import QuantizedWeight
from vlora.errors import BadConfig, UnsupportedModel
from vlora.lora.base_weights import tail

_SUFFIXES = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
}
_OPTIONAL = frozenset(("g_idx", "weight_g_idx", "weight_shape"))
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs among the values of an int32


class UnsupportedForm(ValueError):
    """Settings of a form that is not served; the message names them."""


@dataclasses.dataclass(frozen=True)
class GroupedForm:
    """How a checkpoint stores its weights.

    Attributes:
        layout: which tensors a layer has.
        zero_shift: what is added to a stored zero.
    """

    layout: Literal["gptq", "awq", "packed"]
    format: Grouped
    zero_shift: int = 0


def grouped_form(settings: Mapping[str, Any]) -> GroupedForm | None:
    """The form from a checkpoint's `quantization_config`; None if it has no groups.

    Raises:
        UnsupportedForm: A setting is not served.
    """
    method = settings.get("quant_method")
    if method == "gptq":
        return _gptq_form(settings)
    if method == "awq":
        _check("awq", settings, {"bits": (4,), "zero_point": (True,), "version": ("gemm", "GEMM", None)})
        return GroupedForm("awq", Grouped(4, _group("awq", settings), symmetric=False))
    if method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        return _packed_form(settings)
    return None


def _gptq_form(settings: Mapping[str, Any]) -> GroupedForm:
    _check(
        "gptq",
        settings,
        {
            "bits": (4, 8),
            "checkpoint_format": (None, "gptq", "gptq_v2"),
            "format": (None, "gptq", "gptq_v2"),
            "pack_dtype": (None, "int32"),
            "sym": (None, True, False),
            **dict.fromkeys(("is_marlin_format", "lm_head", "dynamic"), (None, False, {})),
        },
    )
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    kept = Grouped(settings["bits"], _group("gptq", settings), symmetric=settings.get("sym") is not False)
    return GroupedForm("gptq", kept, 1 if version == "gptq" else 0)


def _packed_form(settings: Mapping[str, Any]) -> GroupedForm:
    name = "compressed-tensors pack-quantized"
    _check(name, settings, dict.fromkeys(("kv_cache_scheme", "transform_config"), (None, {})))
    _check(name, settings.get("sparsity_config") or {}, {"format": (None, "dense")})
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise UnsupportedForm(f"{name} with {len(groups)} config_groups")
    _check(name, groups[0], {"input_activations": (None,), "output_activations": (None,)})
    weights = groups[0].get("weights") or {}
    _check(
        name,
        weights,
        {
            "num_bits": (4, 8),
            "type": ("int",),
            "dynamic": (False, None),
            "strategy": ("group", "channel"),
            "symmetric": (True, False),
            "actorder": (None, False, "weight", "static"),
        },
    )
    group = None if weights["strategy"] == "channel" else _group(name, weights)
    return GroupedForm("packed", Grouped(weights["num_bits"], group, symmetric=weights["symmetric"]))


def _check(name: str, settings: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> None:
    for key, values in accepted.items():
        if settings.get(key) not in values:
            raise UnsupportedForm(f"{name} with {key} {settings.get(key)!r}")


def _group(name: str, settings: Mapping[str, Any]) -> int | None:
    size = settings.get("group_size")
    if size == -1:
        return None
    if size not in GROUPS:
        raise UnsupportedForm(f"{name} with group_size {size!r}")
    return int(size)


class GroupedFiles:
    """The files of such a checkpoint. Tensors are mapped, and read where they are used."""

    def __init__(self, form: GroupedForm, files: Sequence[str]) -> None:
        """Read the files' headers. Raises BadConfig, UnsupportedModel."""
        self._form = form
        self._layers: dict[str, dict[str, tuple[Any, str]]] = {}  # by tail and suffix: the file, the tensor's name
        self._others: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BadConfig(f"cannot read the weights of {file}: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                layer, _, suffix = name.rpartition(".")
                if suffix not in _SUFFIXES[form.layout]:
                    self._others[name] = opened
                elif self._layers.setdefault(tail(layer), {}).setdefault(suffix, (opened, name)) != (opened, name):
                    raise UnsupportedModel(f"two layers of the checkpoint have tensors named {tail(name)}")

    def check(self, linears: Mapping[str, nn.Linear]) -> None:
        """Check that each of these layers, the language model's, and no other one has tensors of the right shapes.

        Raises:
            BadConfig: A tensor is missing, or has another shape or unexpected values.
            UnsupportedModel: Other layers are quantized too, or groups are not adjacent inputs.
        """
        for name, linear in linears.items():
            self._check_layer(name, linear.in_features, linear.out_features)
        more = self._layers.keys() - {tail(name) for name in linears}
        if more:
            raise UnsupportedModel(
                f"the checkpoint has quantized weights of {min(more)}, which is outside the language model's linear "
                "layers; these alone may be quantized"
            )

    def tensors(self, linears: Mapping[str, nn.Linear], dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors that are not quantized, by their names in the files, and weights of zeros without memory for the
        quantized ones."""
        found = {name: opened.get_tensor(name) for name, opened in self._others.items()}
        for name, linear in linears.items():
            _, own = self._layers[tail(name)][_SUFFIXES[self._form.layout][0]]
            zeros = torch.zeros(1, dtype=dtype).expand(linear.out_features, linear.in_features)
            found[f"{own.rpartition('.')[0]}.weight"] = zeros
        return found

    def weight(self, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """The weight of a layer that has been checked. dtype: of its products."""
        kind, layer = self._form.format, tail(name)
        if self._form.layout == "packed":
            values = self._read(layer, "weight_packed").view(torch.uint8)
            scales = self._read(layer, "weight_scale").float()
            zeros = None if kind.symmetric else _unpacked(self._read(layer, "weight_zero_point").t(), kind.bits).t()
        else:
            packed = self._read(layer, "qweight")
            if self._form.layout == "gptq":  # the values of an int32 are neighbouring inputs
                values = packed.t().contiguous().view(torch.uint8)
            else:
                values = kind.pack(_awq_order(_unpacked(packed, kind.bits)).t().contiguous())
            scales = self._read(layer, "scales").float().t()
            zeros = None if kind.symmetric else self._zeros(layer).t()
        if zeros is not None:
            scales = torch.cat([scales, -zeros.float() * scales], 1)
        return QuantizedWeight(values, scales.contiguous(), dtype, kind)

    def _check_layer(self, name: str, d_in: int, d_out: int) -> None:
        kind, layer = self._form.format, self._layers.get(tail(name), {})
        packed = 32 // kind.bits
        if d_in % kind.alignment or d_in % packed or d_out % packed:
            raise UnsupportedModel(f"{name} has {d_out} x {d_in} weights, which groups of {kind.group} do not divide")
        groups = d_in // (kind.group or d_in)
        shapes = {
            "gptq": ((d_in // packed, d_out), (groups, d_out), (groups, d_out // packed), (d_in,)),
            "awq": ((d_in, d_out // packed), (groups, d_out), (groups, d_out // packed)),
            "packed": ((d_out, d_in // packed), (d_out, groups), (d_out // packed, groups), (d_in,), (2,)),
        }[self._form.layout]
        for suffix, shape in zip(_SUFFIXES[self._form.layout], shapes, strict=True):
            if suffix not in layer:
                if suffix in _OPTIONAL or (suffix == "weight_zero_point" and kind.symmetric):
                    continue
                raise BadConfig(
                    f"the checkpoint is stored in {kind.name}, but has no {name}.{suffix}; its files are incomplete, "
                    "or it was quantized in part"
                )
            opened, own = layer[suffix]
            found = tuple(opened.get_slice(own).get_shape())
            if found != shape:
                raise BadConfig(f"{own} has the shape {list(found)}; for {d_out} x {d_in} weights it is {list(shape)}")
        self._check_values(name, d_in)

    def _check_values(self, name: str, d_in: int) -> None:
        kind, layer = self._form.format, tail(name)
        for suffix in ("g_idx", "weight_g_idx"):
            if suffix in self._layers[layer]:
                order = self._read(layer, suffix)
                if not torch.equal(order.long(), torch.arange(d_in) // (kind.group or d_in)):
                    raise UnsupportedModel(
                        f"{name} has groups of inputs that are not neighbours (desc_act); quantize the model with "
                        "desc_act false, or use the checkpoint in bfloat16"
                    )
        if self._form.layout == "gptq" and kind.symmetric:
            zeros = self._zeros(layer) - self._form.zero_shift
            middle = 2 ** (kind.bits - 1)
            # Some checkpoints have the zeros of gptq_v2 without its name. With sym the middle is meant in either case.
            if not (zeros.eq(middle - 1).all() or zeros.eq(middle).all()):
                raise BadConfig(f"{name}.qzeros has other values than {middle} (or one less), although sym is true")

    def _zeros(self, layer: str) -> Tensor:
        """[groups, d_out]."""
        zeros = _unpacked(self._read(layer, "qzeros"), self._form.format.bits)
        return (_awq_order(zeros) if self._form.layout == "awq" else zeros).int() + self._form.zero_shift

    def _read(self, layer: str, suffix: str) -> Tensor:
        opened, name = self._layers[layer][suffix]
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] to values [n, m * 32 / bits], the lowest bits of an int32 first."""
    values = packed.contiguous().view(torch.uint8)
    return torch.stack([values & 15, values >> 4], -1).flatten(-2) if bits == 4 else values


def _awq_order(values: Tensor) -> Tensor:
    """Values [n, outputs] of AWQ, in the order of the outputs."""
    return values.unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)
