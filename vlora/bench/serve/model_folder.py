"""A model folder and adapter folders in hub format, with random weights that give input-dependent answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast

from vlora.bench.dummy import language_shapes, write_adapter
from vlora.bench.serve.load import WORDS

RANK = 16
_CHAT_TEMPLATE = (
    "{% for message in messages %}<start>user{% if message['content'] is string %} {{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<vision><image></vision>"
    "{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}<start>assistant"
)


class ModelFiles(NamedTuple):
    """A model's folder, and its adapters' folders by name."""

    model: str
    adapters: Mapping[str, str]


def write_model(config: Any, folder: Path, seed: int = 0) -> dict[str, tuple[int, int]]:
    """Write a Qwen2-VL of this config into a folder: weights in bfloat16, tokenizer, image processor. No token ends an
    answer.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # needs Pillow

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    weights = {name: drawn.to(torch.bfloat16) for name, drawn in answering_weights(model, seed)}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(str(folder))
    GenerationConfig(pad_token_id=0).save_pretrained(str(folder))
    _tokenizer(config).save_pretrained(str(folder))
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    Qwen2VLImageProcessorPil(
        patch_size=config.vision_config.patch_size,
        merge_size=config.vision_config.spatial_merge_size,
        size={"shortest_edge": 4 * side**2, "longest_edge": 1280 * side**2},
    ).save_pretrained(str(folder))
    return language_shapes(model)


def answering_weights(model: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random values in float32 for each parameter of a model; its own values are not read.

    Matrices have standard deviation 0.6 / sqrt(inputs), and embeddings 0.5, so that every layer affects the logits: at
    transformers' own 0.02 the logits would depend on little more than the last token.
    """
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # Weights of norms around 1; biases around 0.
            yield name, torch.randn(parameter.shape, generator=draws) * 0.05 + name.endswith("weight")
        else:
            scale = 0.5 if "embed_tokens" in name else 0.6 / parameter[0].numel() ** 0.5
            yield name, torch.randn(parameter.shape, generator=draws) * scale


def write_model_files(config: Any, folder: Path, num_adapters: int) -> ModelFiles:
    """Write the model, and LoRA adapters of rank `RANK` on every linear layer of its language model."""
    shapes = write_model(config, folder / "model")
    names = [f"adapter-{index}" for index in range(num_adapters)]
    adapters = {name: write_adapter(folder / name, shapes, RANK, seed=seed) for seed, name in enumerate(names)}
    return ModelFiles(str(folder / "model"), adapters)


def _tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """A word for each id of the vocabulary, so that an answer's text identifies its tokens."""
    special = {
        "<pad>": 0,
        "<unk>": 1,
        "<start>": 2,
        "<end>": 3,
        "<vision>": config.vision_start_token_id,
        "</vision>": config.vision_end_token_id,
        "<image>": config.image_token_id,
        "<video>": config.video_token_id,
    }
    named = {word: 4 + index for index, word in enumerate(("user", "assistant", *WORDS))}
    vocabulary = {**special, **named}
    taken = set(vocabulary.values())
    vocabulary |= {f"w{index}": index for index in range(config.text_config.vocab_size) if index not in taken}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[token for token in special if token not in ("<pad>", "<unk>")],
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
