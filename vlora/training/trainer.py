"""Adapters in training over one served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from atmm.processor import prefers_float32
from vlora.errors import BadConfig, BadRequest
from vlora.models.hf_model import HFModel
from vlora.training.adapter import LoraSettings, TrainableLora
from vlora.training.batch import PackedBatch, Sample
from vlora.training.decoder import TrainedDecoderLayer, TrainedLinear
from vlora.training.micro_step import MAX_LOGITS, MicroStep


class PackedTrainer:
    """Trains any number of adapters of the language model, each with its own settings and optimizer.

    All calls come from the thread that runs the model.
    """

    def __init__(self, hf_model: HFModel, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Prepare a model. Its parameters are frozen from now on.

        Args:
            weights: W0 of its language model's linear layers, by name. None: their present weights, if no adapter is
                merged. With a `ShadowSwitcher` these remain W0; switching in place overwrites them, so that nothing may
                be merged during a micro-step.

        Raises:
            BadConfig: The weights are quantized, or sharded over several ranks.
        """
        self._hf_model = hf_model
        layers = hf_model.language_linears.values()
        if any(layer.quantized is not None for layer in (*layers, hf_model.lm_head)):
            raise BadConfig("training needs weights that are not quantized; start without --quantize")
        if any(layer.shard.size > 1 for layer in layers):
            raise BadConfig("training needs the whole model in one process; start without --tensor-parallel")
        hf_model.model.requires_grad_(False)
        self._linears = {
            name: TrainedLinear(name, layer, layer.weight.detach() if weights is None else weights[name])
            for name, layer in hf_model.language_linears.items()
        }
        self._layers = []
        for index in range(hf_model.num_layers):
            module = hf_model.text_model.layers[index]
            inner = set(module.modules())
            own = {name: layer for name, layer in self._linears.items() if layer.module in inner}
            self._layers.append(TrainedDecoderLayer(module, hf_model.text_model.config, index, own))
        self.adapters: dict[str, TrainableLora] = {}

    def add(self, name: str, settings: LoraSettings) -> TrainableLora:
        """Create an adapter. Raises BadConfig for a name in use, and for targets that the model lacks."""
        if name in self.adapters:
            raise BadConfig(f"an adapter {name!r} is in training already; remove it, or choose another name")
        shapes = self.shapes(settings)
        adapter = self.adapters[name] = TrainableLora(name, settings, shapes, self._hf_model.embed.weight)
        for layer, factors in adapter.factors.items():
            self._linears[layer].attach(name, factors, settings.scale)
        return adapter

    def shapes(self, settings: LoraSettings) -> dict[str, tuple[int, int]]:
        """(d_in, d_out) of each target layer. Raises BadConfig for targets that the model lacks."""
        known = {layer.rpartition(".")[2] for layer in self._linears}
        if unknown := sorted(set(settings.targets) - known):
            raise BadConfig(
                f"targets: no linear layer is named {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        return {
            layer: (own.site.d_in, own.site.d_out)
            for layer, own in self._linears.items()
            if layer.rpartition(".")[2] in settings.targets
        }

    def step_bytes(self, lengths: Sequence[int], *, recompute: bool) -> int:
        """Memory for the activations of a micro-step, at most. lengths: tokens of its samples.

        Autograd keeps the inputs or outputs of all linear layers, which stand for those of the operations between them
        too, and the attention's shares in float32 and in the model's dtype. In 16 bits the norms keep their inputs in
        float32, and so does the attention with queries, keys and values where it is computed in float32.
        """
        size, num_tokens = self._hf_model.dtype.itemsize, sum(lengths)
        widened = prefers_float32(self._hf_model.dtype, self._hf_model.device)
        config, num_layers = self._hf_model.text_model.config, len(self._layers)
        heads = config.num_attention_heads
        shares = heads * sum(length * length for length in lengths) * (4 if size == 4 or widened else 4 + size)
        linears = size * num_tokens * sum(own.site.d_in + own.site.d_out for own in self._linears.values())
        if size < 4:
            linears += 4 * num_tokens * num_layers * 2 * config.hidden_size
        if widened:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            linears += 4 * num_tokens * num_layers * (heads + 2 * config.num_key_value_heads) * head_dim
        largest = linears // num_layers + 3 * shares  # while one layer is computed, forward or backward
        words = self._hf_model.lm_head.out_features
        logits = 3 * 4 * min(num_tokens * words, max(MAX_LOGITS, words))
        hidden = size * num_tokens * self._hf_model.embed.embedding_dim
        kept = num_layers * hidden if recompute else linears + num_layers * shares
        return kept + 4 * hidden + max(largest, logits)

    def remove(self, name: str) -> None:
        """Forget an adapter. Its micro-step, if there is one, must be complete or abandoned."""
        assert not self.adapters[name].busy, f"a micro-step with adapter {name} is under way"
        for layer in self.adapters.pop(name).factors:
            self._linears[layer].detach(name)

    def micro_step(
        self, samples: Mapping[str, Sequence[Sample]], *, recompute: bool = False, learns: bool = True
    ) -> MicroStep:
        """Begin a micro-step.

        Args:
            samples: By adapter, at least one each.
            recompute: Compute every layer again before its backward pass instead of keeping its activations: less
                memory, half as much time again.
            learns: False computes losses only, for an evaluation: adapters and their gradients remain as they are.

        Raises:
            BadRequest: An adapter is unknown or has no samples, or a sample does not fit the model.
        """
        if unknown := sorted(samples.keys() - self.adapters.keys()):
            raise BadRequest(f"no adapter in training is named {', '.join(unknown)}; add it first")
        empty = sorted(name for name, own in samples.items() if not own)
        if empty or not samples:
            raise BadRequest(
                f"a micro-step needs samples of every adapter; there are none of {', '.join(empty) or 'any'}"
            )
        batch = PackedBatch(self._hf_model, samples)
        return MicroStep(self._hf_model, self._layers, self.adapters, batch, recompute=recompute, learns=learns)
