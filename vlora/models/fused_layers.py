"""Rotary embeddings, RMS norms and gated MLPs of a model with one kernel each, and patch embeddings as products.

The models' own code runs otherwise: in training, and for layers that compute something else. On a CPU the layers of a
decode step take as long to call as to compute where one operation is one call: `FusedLayers` calls as few as possible.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUTanh, QuickGELUActivation

import atmm
from atmm.matmul import patch_products
from vlora.lora.adapted_linear import AdaptedLinear, outputs_of
from vlora.models.attention import KVCache, PagedChunk, PagedDecodes, StepAttention

_ROTATION, _TOWER_ROTATION = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"  # names in the models' code


def fuse_rotations(model: nn.Module) -> int:
    """Let every attention with rotary embeddings of a model use the kernel, if it fits.

    An attention qualifies if its code calls one of the two functions and this returns the same as the formula.
    Its code then runs with a function in place of that one that uses the kernel where there is one.

    Returns:
        The number of changed attention layers.
    """
    return change_classes(model, lambda module: _fused_attention(type(module)))


def _fused_attention(kind: type) -> type | None:
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType):
        return None
    name = _ROTATION if _ROTATION in forward.__code__.co_names else _TOWER_ROTATION
    plain = forward.__globals__.get(name) if name in forward.__code__.co_names else None
    rotation = _Rotation(plain, in_tower=name == _TOWER_ROTATION)
    if isinstance(plain, _Rotation) or plain is None or not rotation.holds():
        return None
    names = {**forward.__globals__, name: rotation}
    changed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Rotating{kind.__name__}", (kind,), {"forward": changed})


class _Rotation:
    """`apply_rotary_pos_emb`, or that of a tower, which computes in float32; in place by the kernel if there is one.

    Arguments are [1, heads, T, head_dim] and [1, T, head_dim]; in a tower [T, heads, head_dim] and [T, head_dim].
    """

    def __init__(self, plain: Any, *, in_tower: bool) -> None:
        self._plain, self._in_tower = plain, in_tower

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._in_tower:
            usual, sides = q.is_cpu, (q.transpose(0, 1), k.transpose(0, 1), cos.float(), sin.float())
        else:
            usual, sides = len(q) == 1 and q.dtype == cos.dtype, (q[0], k[0], cos[0], sin[0])  # other under autocast
        if not usual or rest or options or torch.is_grad_enabled() or not atmm.try_to_rotate(*sides):
            plain: tuple[torch.Tensor, torch.Tensor] = self._plain(q, k, cos, sin, *rest, **options)
            return plain
        return q, k

    def holds(self) -> bool:
        """Whether the function computes `x * cos + rotate_half(x) * sin` for both of its first arguments."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
        cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))

        def rotated(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        wanted = rotated(q), rotated(k)
        try:
            if self._in_tower:
                turned = self._plain(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
                got = [x.transpose(0, 1)[None] for x in turned]
            else:
                got = self._plain(q, k, cos, sin)
        except (TypeError, RuntimeError, IndexError, ValueError):
            return False  # another signature
        return len(got) == 2 and all(map(torch.equal, got, wanted))


class _FusedNorm(nn.Module):
    """A mixin for the class of a norm `weight * round(x / sqrt(mean(x^2) + variance_epsilon))`."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        fits = hidden_states.dtype == weight.dtype and not torch.is_grad_enabled()
        if fits and atmm.serves_pointwise(weight.device, weight.dtype):
            return atmm.rms_norm(hidden_states, weight, self.variance_epsilon)
        normalized: torch.Tensor = super().forward(hidden_states)
        return normalized


def fuse_norms(model: nn.Module) -> int:
    """Let every RMS norm of a model use the kernel of its device, if it computes this function.

    A class qualifies if its name ends with RMSNorm, it has the two parameters, and it returns the same as the formula
    for some values. Without a kernel the model's own code runs.

    Returns:
        The number of replaced norms.
    """
    return change_classes(model, _fused)


def _fused(norm: Any) -> type | None:
    kind = type(norm)
    if not kind.__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
        return None
    return type(f"Fused{kind.__name__}", (_FusedNorm, kind), {}) if _computes_the_same(norm) else None


@torch.inference_mode()
def _computes_the_same(norm: Any) -> bool:
    weight = norm.weight
    if weight.is_meta:  # a model that is never run
        return False
    x = torch.linspace(-3, 5, 2 * weight.numel(), device=weight.device).view(2, -1).to(weight.dtype)
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    own, formula = norm(x).float(), (weight * quotient.to(weight.dtype)).float()
    tolerance = 4 * torch.finfo(weight.dtype).eps * float(own.abs().max())
    return own.shape == formula.shape and bool((own - formula).abs().max() <= tolerance)


class _FusedMLP(nn.Module):
    """A mixin for the class of an MLP `down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    gate_proj: AdaptedLinear
    up_proj: AdaptedLinear
    down_proj: AdaptedLinear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not atmm.serves_pointwise(x.device, x.dtype):
            plain: torch.Tensor = super().forward(x)
            return plain
        gate, up = outputs_of((self.gate_proj, self.up_proj), x)
        product: torch.Tensor = self.down_proj(atmm.gate_product(gate, up))
        return product


def fuse_gates(model: nn.Module) -> int:
    """Let every gated MLP of a model use the kernel, if it fits.

    An MLP qualifies if it has the three projections and its class returns the same as the formula for some values.

    Returns:
        The number of changed MLPs.
    """
    return change_classes(model, _fused_mlp)


def _fused_mlp(mlp: Any) -> type | None:
    kind = type(mlp)
    projections = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if isinstance(mlp, _FusedMLP) or not all(isinstance(projection, nn.Linear) for projection in projections):
        return None
    weight = mlp.gate_proj.weight
    if weight.is_meta:  # a model that is never run
        return None
    with torch.inference_mode():
        dtype = getattr(mlp.gate_proj, "stored", weight).dtype  # a quantized weight's values have another
        x = torch.linspace(-1, 1, mlp.gate_proj.in_features, dtype=dtype, device=weight.device)[None]
        same = torch.equal(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    return type(f"Fused{kind.__name__}", (_FusedMLP, kind), {}) if same else None


class _FusedGelu(nn.Module):
    """A mixin for the class of an activation that `atmm.gelu` computes. quick: its argument."""

    quick: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        place = input.device, input.dtype
        if torch.is_grad_enabled() or atmm.reads_in_place(*place) or not atmm.serves_pointwise(*place):
            plain: torch.Tensor = super().forward(input)
            return plain
        return atmm.gelu(input, quick=self.quick)


def fuse_gelus(model: nn.Module) -> int:
    """Let the activations of a model that take several passes, or a slow one, use the kernel on a CPU.

    Returns:
        The number of changed modules.
    """
    return change_classes(model, lambda module: _fused_gelu(type(module)))


def _fused_gelu(kind: type) -> type | None:
    if kind not in (QuickGELUActivation, GELUTanh):
        return None
    return type(f"Fused{kind.__name__}", (_FusedGelu, kind), {"quick": kind is QuickGELUActivation})


_STEPS_BEFORE_TAPE = 3
MOST_TAPED = 16  # tokens: a tape keeps the values of all layers

_Given = tuple[Sequence[torch.Tensor], StepAttention, PagedDecodes, Sequence[Any]]
"""Embeddings, cosines and sines, which may be overwritten; the step, its queries, and what else the layers read: the
plan of the lanes, the weights, and the lanes' factors."""


class _Decode:
    """Decode steps of one number of requests over the same weights, with the same lanes: their calls are recorded once.

    The calls read and write the same addresses in every step, to which its inputs are copied. out: its result.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], given: _Given) -> None:
        """Run the first step."""
        self._inputs, step, queries, self._read = given
        self._queries, self._tape = queries.with_room(), atmm.Tape()
        self._queries.hold(queries)
        self._step = StepAttention(step.cache, step.write_rows.clone(), [self._queries], [self._queries])
        with self._tape:
            self.out = compute(*self._inputs, self._step)
        self.complete = self._tape.complete

    def repeats(self, given: _Given) -> bool:
        """Run a step, if it is one of these."""
        inputs, step, queries, read = given
        same = step.cache is self._step.cache and all(map(operator.is_, read, self._read))
        if not same or not self.complete or not self._queries.hold(queries):
            return False
        for own, value in zip((*self._inputs, self._step.write_rows), (*inputs, step.write_rows), strict=True):
            own.copy_(value)
        self._tape.repeat()
        return True


class FusedLayers:
    """The layers of a text model with one call for each norm with the sum before it, each rotation with the KV write,
    each gate, and each group of layers that read one input. Decode steps that recur repeat these calls alone.
    """

    def __init__(self, text_model: Any, head_dim: int) -> None:
        self._model, self._layers, self._head_dim = text_model, list(text_model.layers), head_dim
        linears = [each for each in text_model.layers.modules() if isinstance(each, AdaptedLinear)]
        self._parameters = [each._parameters for each in linears]  # noqa: SLF001  (attributes of modules are slow)
        self._linears, self._sites = linears, [each.site for each in linears]
        self._decode: _Decode | None = None
        self._recent: tuple[Any, ...] = ()  # tokens and lanes of the last decode steps that were not repeated
        self._most_taped = MOST_TAPED
        self._not_taped: atmm.SegmentPlan | None = None  # lanes for which torch computes

    @classmethod
    def of(cls, text_model: Any, head_dim: int, *, mrope: bool) -> FusedLayers | None:
        """The layers of a model on a CPU with compiled kernels, if they compute the same as the model's own code.

        The first layer is compared; the others must be of the same classes.
        """
        layers, weight, half = text_model.layers, text_model.norm.weight, head_dim // 2
        fits = atmm.serves_pointwise(weight.device, weight.dtype) and atmm.serves_attention(weight.device, weight.dtype)
        kinds = {(type(layer), *(type(part) for part in layer.children())) for layer in layers}
        if not fits or len(kinds) != 1 or not weight.is_cpu or half & (half - 1):
            return None
        fused = cls(text_model, head_dim)
        text_model.layers = layers[:1]
        try:
            return fused if cls(text_model, head_dim).computes_the_same(mrope) else None
        except AttributeError:  # other parts
            return None
        finally:
            text_model.layers = layers

    def __call__(self, embeddings: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        """Embeddings [T, hidden] and rotary positions to hidden states [T, hidden] after the final norm.

        Without gradients, and on a CPU. The result is valid until the next call.
        """
        cos, sin = (part[0].contiguous() for part in self._model.rotary_emb(embeddings, positions))
        inputs = embeddings.clone(memory_format=torch.contiguous_format), cos, sin
        num_tokens, queries = len(embeddings), step.queries[0]
        plan = self._layers[0].self_attn.o_proj.scope.plan_for(num_tokens)
        varies = step.queries is not step.last_queries or num_tokens > self._most_taped
        if plan is not None:  # other kinds of factors are held elsewhere
            varies = varies or plan is self._not_taped or any(each.others for each in self._linears)
        if varies or not isinstance(queries, PagedDecodes) or len(queries.places) != num_tokens:
            return self._compute(*inputs, step)
        read = [plan, *(own["weight"] for own in self._parameters)]
        for site in () if plan is None else self._sites:
            read += site.group and site.group.packed, *map(site.factors.get, plan.keys)
        given = inputs, step, queries, read
        if self._decode is None or not self._decode.repeats(given):
            self._recent = (*self._recent[-_STEPS_BEFORE_TAPE:], (num_tokens, plan))
            if self._recent != ((num_tokens, plan),) * (_STEPS_BEFORE_TAPE + 1):
                return self._compute(*inputs, step)
            self._recent, self._decode = (), _Decode(self._compute, given)
            if not self._decode.complete:
                self._not_taped, self._most_taped = plan, num_tokens - 1 if plan is None else self._most_taped
        return self._decode.out

    def _compute(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepAttention) -> torch.Tensor:
        """As the call, for embeddings that it overwrites."""
        x = self._layers[0].input_layernorm(hidden)
        norms = [*(layer.input_layernorm for layer in self._layers[1:]), self._model.norm]
        for index, (layer, following) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._attend(index, layer.self_attn, x, cos, sin, step)
            x = _add_norm(hidden, layer.self_attn.o_proj(attended), layer.post_attention_layernorm)
            x = _add_norm(hidden, layer.mlp(x), following)
        return x

    def _attend(
        self, index: int, module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        linears = module.q_proj, module.k_proj, module.v_proj
        # Norms of heads would copy parts of a joint result.
        q, k, v = [each(x) for each in linears] if hasattr(module, "q_norm") else outputs_of(linears, x)
        queries, keys = q.unflatten(1, (-1, self._head_dim)), k.unflatten(1, (-1, self._head_dim))
        if hasattr(module, "q_norm"):
            queries, keys = module.q_norm(queries), module.k_norm(keys)
            k = keys.flatten(1)
        atmm.rotate_and_write(
            *(queries.transpose(0, 1), keys.transpose(0, 1), v, cos, sin),
            *(step.cache.k[index], step.cache.v[index], step.write_rows),
        )
        return step.attend(index, queries, (k, v), getattr(module, "scaling", None)).flatten(1)

    @torch.inference_mode()
    def computes_the_same(self, mrope: bool) -> bool:
        """Whether they and the model's code give the same for some values."""
        attention, weight = self._layers[0].self_attn, self._model.norm.weight
        # Beside the last row the layer's own outputs are small, beside the others large.
        scales = torch.tensor([[0.01], [0.01], [1.0]])
        x = (torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)) * scales).to(weight.dtype)
        places, cache = np.arange(len(x)), KVCache(x.new_zeros(8, attention.k_proj.out_features), 1, 4)
        chunk = [PagedChunk.of(places, 0, places)]
        step = StepAttention(cache, torch.from_numpy(places), chunk, chunk)
        positions = torch.tensor([[0, 1, 2], [0, 5, 7], [1, 3, 2]])[:, None] if mrope else torch.tensor([[0, 1, 2]])
        own = self._model(inputs_embeds=x[None], position_ids=positions, use_cache=False, vlora_step=step)
        wanted = own.last_hidden_state[0].float()
        differences = (self(x, positions, step).float() - wanted).abs().mean(1)
        return bool((differences <= max(torch.finfo(x.dtype).eps / 4, 2**-20) * wanted.abs().mean(1)).all())


def _add_norm(x: torch.Tensor, added: torch.Tensor, norm: Any) -> torch.Tensor:
    return atmm.add_rms_norm(x, added, norm.weight, norm.variance_epsilon)


class _Patches(nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return patch_products(input, self.weight, self.bias)


_CLASSES: dict[type, type] = {k: type(f"Patch{k.__name__}", (_Patches, k), {}) for k in (nn.Conv2d, nn.Conv3d)}


def convert_patch_embeddings(model: nn.Module) -> int:
    """Compute convolutions of disjoint patches as products with the same weights, not copied. Returns their number.

    cuDNN takes seconds for Qwen's convolution in three dimensions. A CPU multiplies faster too (docs/decisions/0045).
    """
    found = [module for module in model.modules() if type(module) in _CLASSES and _is_disjoint(module)]
    for module in found:
        module.__class__ = _CLASSES[type(module)]
    return len(found)


def _is_disjoint(conv: Any) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and (conv.padding == "valid" or set(conv.padding) == {0})
    return plain and conv.stride == conv.kernel_size and conv.weight.is_contiguous()


def change_classes(model: nn.Module, target_of: Callable[[nn.Module], type | None]) -> int:
    """Give modules of a model another class, in place.

    Args:
        target_of: The class to use instead of a module's own; None to keep it. Called once per class.

    Returns:
        The number of changed modules.
    """
    targets: dict[type, type | None] = {}
    number = 0
    for module in model.modules():
        kind = type(module)
        if kind not in targets:
            targets[kind] = target_of(module)
        target = targets[kind]
        if target is not None:
            module.__class__ = target
            number += 1
    return number
