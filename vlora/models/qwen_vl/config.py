"""The configuration of Qwen-VL and its image processor, from a checkpoint's config.json in its published form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config

from vlora.errors import UnsupportedModel

STORED_TYPE = "qwen"
"""`model_type` in the published config.json, also of Qwen's text models of the first generation."""

# Values that the code of the checkpoints fixes, and its default for a missing `kv_channels`.
_NUM_QUERIES = 256
_NUM_POSITIONS = 256
_POOL_HEAD_WIDTH = 128
_HEAD_WIDTH = 128

# Special tokens by their distance from the start-of-image token, which is equal in every checkpoint (see `tokenizer`).
_END_OF_TEXT, _TURN_START, _TURN_END, _IMAGE_PAD = -214, -213, -212, 2


class QwenVLVisionConfig(PreTrainedConfig):
    """The vision tower, and the resampler between it and the language model.

    Attributes:
        num_positions: Rows of the learned position embedding, a square grid that is interpolated to the patches.
        num_queries: Embeddings of one image; a square.
        output_dim: Width of the resampler, which is the language model's.
    """

    model_type = "qwen_vl_vision"
    base_config_key = "vision_config"

    hidden_size: int = 1664
    intermediate_size: int = 8192
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    image_size: int = 448
    patch_size: int = 14
    layer_norm_eps: float = 1e-6
    num_positions: int = _NUM_POSITIONS
    num_queries: int = _NUM_QUERIES
    num_pool_heads: int = 32
    output_dim: int = 4096
    initializer_range: float = 0.02


class QwenVLConfig(PreTrainedConfig):
    """The whole model.

    Attributes:
        image_token_id: The placeholder of one embedding of an image.
        turn_end_ids: Tokens that end an answer of the chat model, beside the end of text in generation_config.json.
    """

    model_type = "qwen_vl"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": Qwen2Config, "vision_config": QwenVLVisionConfig}

    text_config: Any = None
    vision_config: Any = None
    image_token_id: int = 151859
    turn_end_ids: Any = ()
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name, kind in self.sub_configs.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                setattr(self, name, kind(**(given or {})))
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a checkpoint's config.json.

        Raises:
            UnsupportedModel: The model is none that this package computes.
            ValueError: A field is missing or malformed.
        """
        stored, rest = super().get_config_dict(*args, **kwargs)
        if stored.get("model_type") != STORED_TYPE:
            return stored, rest
        try:
            return translated(stored), rest
        except KeyError as error:
            raise ValueError(f"its config.json has no field {error}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"its config.json is not valid: {error}") from error


def translated(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A published config.json in the form of `QwenVLConfig`.

    Dynamic NTK scaling and log-n attention depend on a request's length, but only above `seq_length`, so with either of
    them requests are limited to it.

    Raises:
        UnsupportedModel: The model is none that this package computes.
    """
    visual = stored.get("visual")
    if not visual:
        raise UnsupportedModel(
            f"model type {STORED_TYPE!r} without a 'visual' section in config.json is a text model, which has no "
            "image input; supported is Qwen-VL (Qwen/Qwen-VL, Qwen/Qwen-VL-Chat)"
        )
    width, heads, start = stored["hidden_size"], stored["num_attention_heads"], visual["image_start_id"]
    for name, value, served in (
        ("no_bias", stored.get("no_bias", True), True),
        ("rotary_pct", stored.get("rotary_pct", 1.0), 1.0),
        ("scale_attn_weights", stored.get("scale_attn_weights", True), True),
        ("tie_word_embeddings", stored.get("tie_word_embeddings", False), False),
        ("visual.output_dim", visual["output_dim"], width),
    ):
        if value != served:
            raise UnsupportedModel(f"Qwen-VL with {name} = {value!r} is not supported; supported: {served!r}")
    bounded = stored.get("use_dynamic_ntk", True) or stored.get("use_logn_attn", True)
    text = {
        "vocab_size": stored["vocab_size"],
        "hidden_size": width,
        "intermediate_size": stored["intermediate_size"] // 2,  # of both halves of SwiGLU together
        "num_hidden_layers": stored["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": stored.get("kv_channels", _HEAD_WIDTH),
        "max_position_embeddings": stored["seq_length" if bounded else "max_position_embeddings"],
        "rms_norm_eps": stored["layer_norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(stored.get("rotary_emb_base", 10000))},
        "eos_token_id": start + _END_OF_TEXT,
        "bos_token_id": None,
    }
    vision = {
        "hidden_size": visual["width"],
        "intermediate_size": int(visual["width"] * visual["mlp_ratio"]),
        "num_hidden_layers": visual["layers"],
        "num_attention_heads": visual["heads"],
        "image_size": visual["image_size"],
        "patch_size": visual["patch_size"],
        "num_queries": visual.get("n_queries", _NUM_QUERIES),
        "num_pool_heads": visual["output_dim"] // _POOL_HEAD_WIDTH,
        "output_dim": visual["output_dim"],
    }
    optional = {
        "dtype": stored.get("dtype") or stored.get("torch_dtype"),
        "quantization_config": stored.get("quantization_config"),
    }
    return {
        "model_type": QwenVLConfig.model_type,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": start + _IMAGE_PAD,
        "turn_end_ids": (start + _TURN_START, start + _TURN_END),
        **{name: value for name, value in optional.items() if value},
    }


class QwenVLImageProcessor:
    """Makes the image processor of a checkpoint, which has no file for it; the instances are transformers' of CLIP."""

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **options: Any) -> Any:
        """The processor for the image size in a checkpoint's config.json. options: have no effect."""
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # needs Pillow

        stored, _ = QwenVLConfig.get_config_dict(model)
        side = stored["vision_config"]["image_size"]
        return CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False)
