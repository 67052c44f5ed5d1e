"""Qwen2-VL of small sizes, for tests that count or schedule steps."""

from __future__ import annotations

from transformers import Qwen2VLConfig


def qwen2_vl(vocab: int, hidden: int, num_layers: int, *, heads: int, mrope: tuple[int, int, int]) -> Qwen2VLConfig:
    """Half as many KV heads as heads; the last four tokens of the vocabulary mark images and videos."""
    return Qwen2VLConfig(
        text_config={
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(mrope)},
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2},
        vision_start_token_id=vocab - 1,
        vision_end_token_id=vocab - 2,
        image_token_id=vocab - 3,
        video_token_id=vocab - 4,
    )
