"""The small model's architecture, tokenizer and image processor, before any training."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fusion.embedded.world import CELL, GRID, SIZE, words

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD, BOS, EOS, UNK, IMAGE = range(len(SPECIAL))
VOCAB_SIZE = 256  # room for words that domains of later plans may need
TOKENS_PER_IMAGE = GRID * GRID

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['content'] is string %}{% set parts = [{'type': 'text', 'text': message['content']}] %}"
    "{% else %}{% set parts = message['content'] %}{% endif %}"
    "{% for part in parts %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)


def build_model() -> LlavaForConditionalGeneration:
    """A LLaVA of about 5 M parameters: CLIP vision tower 4 x 192 over 96-pixel images, Llama 4 x 256."""
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=SIZE,
        patch_size=CELL,
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
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=TOKENS_PER_IMAGE,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word by word, lower case, punctuation apart."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words()))}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        additional_special_tokens=[SPECIAL[IMAGE]],
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_image_processor() -> CLIPImageProcessorPil:
    """96 x 96, values from -1 to 1."""
    half = [0.5, 0.5, 0.5]
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, image_mean=half, image_std=half
    )


def save_processor(folder: Path) -> None:
    """Write tokenizer, image processor and chat template so that `AutoProcessor` loads them offline."""
    processor = LlavaProcessor(
        image_processor=build_image_processor(),
        tokenizer=build_tokenizer(),
        patch_size=CELL,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=SPECIAL[IMAGE],
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(str(folder))
