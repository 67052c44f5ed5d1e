"""Qwen-VL as a transformers model: the tower of this package and Qwen2's decoder, which computes the same as Qwen's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, GenerationMixin, PreTrainedModel, Qwen2Model
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from vlora.models.qwen_vl.config import QwenVLConfig
from vlora.models.qwen_vl.tower import QwenVLVisionTower


class QwenVLPreTrainedModel(PreTrainedModel):
    config_class = QwenVLConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class QwenVLModel(QwenVLPreTrainedModel):
    """The model without its output head."""

    def __init__(self, config: QwenVLConfig) -> None:
        super().__init__(config)
        self.visual = QwenVLVisionTower(config.vision_config)
        self.language_model = Qwen2Model(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.language_model.embed_tokens
        return embedding

    def get_image_features(self, pixel_values: Tensor, return_dict: bool = True) -> BaseModelOutputWithPooling:
        """Embeddings of images [b, 3, image_size, image_size], as `pooler_output` [b, num_queries, hidden]."""
        return BaseModelOutputWithPooling(pooler_output=self.visual(pixel_values))

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The decoder's output. pixel_values: the images of all prompts, in order."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if pixel_values is not None:
                rows = self.visual(pixel_values.to(self.visual.dtype))
                places = (input_ids == self.config.image_token_id).unsqueeze(-1)
                inputs_embeds = inputs_embeds.masked_scatter(places, rows.to(inputs_embeds.dtype))
        return self.language_model(inputs_embeds=inputs_embeds, **kwargs)


class QwenVLForConditionalGeneration(QwenVLPreTrainedModel, GenerationMixin):
    def __init__(self, config: QwenVLConfig) -> None:
        super().__init__(config)
        self.model = QwenVLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` tokens (0: all)."""
        out = self.model(input_ids, pixel_values, inputs_embeds, attention_mask=attention_mask, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, *args: Any, pixel_values: Tensor | None = None, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Images are part of the prompt: later steps find them in the cache."""
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        inputs: dict[str, Any] = prepare(*args, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs["pixel_values"] = pixel_values
        return inputs


# Names and shapes in the published checkpoints -> those of this model. Renamings apply first, then one conversion.
_POOL = "model.visual.attn_pool.attn"
register_checkpoint_conversion_mapping(
    QwenVLForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^transformer\.wte\.", "model.language_model.embed_tokens."),
        WeightRenaming(r"^transformer\.ln_f\.", "model.language_model.norm."),
        WeightRenaming(r"^transformer\.visual\.", "model.visual."),
        WeightRenaming(r"^transformer\.h\.", "model.language_model.layers."),
        WeightRenaming(r"\.mlp\.w1\.", ".mlp.up_proj."),
        WeightRenaming(r"\.mlp\.w2\.", ".mlp.gate_proj."),
        WeightRenaming(r"(layers\.\d+)\.ln_1\.", r"\1.input_layernorm."),
        WeightRenaming(r"(layers\.\d+)\.ln_2\.", r"\1.post_attention_layernorm."),
        WeightRenaming(r"(layers\.\d+)\.attn\.c_proj\.", r"\1.self_attn.o_proj."),
        WeightRenaming(r"(layers\.\d+)\.mlp\.c_proj\.", r"\1.mlp.down_proj."),
        WeightConverter(
            ".attn.c_attn.",
            [".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."],
            [Chunk(dim=0)],
        ),
        *(
            WeightConverter(
                f"{_POOL}.in_proj_{part}", [f"{_POOL}.{side}_proj.{part}" for side in "qkv"], [Chunk(dim=0)]
            )
            for part in ("weight", "bias")
        ),
        WeightConverter("model.visual.proj", "model.visual.proj.weight", [Transpose(0, 1)]),
    ],
)
AutoModelForImageTextToText.register(QwenVLConfig, QwenVLForConditionalGeneration)
