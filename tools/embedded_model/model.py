"""The embedded model's architecture: LLaVA with a small CLIP vision tower and a small Llama, from random weights."""

from __future__ import annotations

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from fusion.embedded.drawing import SIZE
from tools.embedded_model.processor import CONTEXT, IMAGE_TOKEN, PATCH, VOCAB_SIZE, vocabulary

IMAGE_TOKENS = (SIZE // PATCH) ** 2


def model_config() -> LlavaConfig:
    vocab = vocabulary()
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=6,
        image_size=SIZE,
        patch_size=PATCH,
        projection_dim=192,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=vocab["<pad>"],
        bos_token_id=vocab["<bos>"],
        eos_token_id=vocab["<eos>"],
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=vocab[IMAGE_TOKEN],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=True,
    )


def build_model(seed: int) -> LlavaForConditionalGeneration:
    """A model with random weights. Position embeddings start as sines and cosines of row and column, since they are
    learned very slowly from noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(model_config())
    embedding = model.model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        embedding[1:] = 0.25 * _grid_positions(SIZE // PATCH, embedding.shape[1])
    return model


def _grid_positions(side: int, width: int) -> torch.Tensor:
    """Sines and cosines of row and column, [side * side, width]."""
    frequencies = torch.logspace(0, -1.2, width // 4) * torch.pi / 2
    place = torch.arange(side)[:, None] * frequencies
    waves = torch.cat([place.sin(), place.cos()], 1)
    rows = waves[:, None].expand(side, side, -1)
    columns = waves[None, :].expand(side, side, -1)
    return torch.cat([rows, columns], -1).reshape(side * side, width)
