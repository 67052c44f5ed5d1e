"""Reads what a checkpoint is, without its weights: whether it is served, its limits, and the memory that it needs."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from atmm.quantized import quantized_bytes
from vlora.config import EngineConfig
from vlora.engine.limits import Room, compute_limits, free_room, shadow_fits
from vlora.engine.quantize import format_of, with_stored_format
from vlora.errors import BadConfig
from vlora.lora.layout import run_bytes
from vlora.memory.arena import PAGE_BYTES, pages_for
from vlora.models.hf_model import HFModel
from vlora.models.loading import check_weights, device_of, dummy_model, named_device, read_config
from vlora.models.processing import InputProcessor
from vlora.parallel.adapter_sharding import FactorShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """A checkpoint and its memory on a device. Sizes are in bytes.

    Attributes:
        text_model: Type of the language model.
        video: Whether videos are accepted beside images.
        takes_tools: Whether the chat template writes tools; otherwise they are described in the system message.
        num_layers: Layers of the language model, as are the next three.
        hidden_size: Values of a hidden state.
        num_parameters: Parameters of the whole model; tied ones count once.
        quantize: Format of the language model's linear layers; none: `dtype`.
        kv_token_bytes: KV cache of one token, all layers.
        device_type: cpu or cuda.
        memory_bytes: Memory of the device, weights included.
        switching: How merged weights are applied: shadow or in_place.
        shadow_bytes: Size of the shadow copy; 0 with in_place.
        arena_bytes: Memory of KV cache and adapters together; 0 if the weights alone do not fit.
        arena_basis: How arena_bytes was determined.
        adapter_rank: The rank for which the next two are given.
        adapter_bytes: An adapter of that rank on every linear layer of the language model.
        num_adapters: Such adapters that are on the device at once.
        kv_tokens: Tokens of KV cache beside the wanted adapters, of which at most `num_adapters` are on the device.
        wanted_arena_bytes: An arena for all wanted adapters at once.
        problems: Why the checkpoint cannot be served on this device; empty if it can.
    """

    model_type: str
    text_model: str
    video: bool
    takes_tools: bool
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    num_parameters: int
    dtype: str
    quantize: str
    weight_bytes: int
    max_context: int
    kv_token_bytes: int
    device_type: str
    memory_bytes: int
    switching: str
    shadow_bytes: int
    arena_bytes: int
    arena_basis: str
    adapter_rank: int
    adapter_bytes: int
    num_adapters: int
    kv_tokens: int
    wanted_arena_bytes: int
    num_files: int
    problems: tuple[str, ...]


def check_model(
    config: EngineConfig, *, adapter_rank: int, wanted_adapters: int = 0, memory_bytes: int | None = None
) -> ModelCheck:
    """Read a checkpoint's configuration, tokenizer and image processor, and the headers of its weights. Of weights that
    are stored by groups, the order of the groups and the zeros are read, too.

    Args:
        config: Settings with the model, its device and dtype, and the sizes that `vlora serve` would use.
        memory_bytes: Memory of the device. None measures the free memory of this machine's.

    Raises:
        BadConfig: The model has no readable configuration, tokenizer or image processor; or the device is not here
            and its memory is not given.
        UnsupportedModel: The model is not supported.
    """
    config = with_stored_format(config)
    model_config = read_config(config.model)
    processor = InputProcessor.from_pretrained(config.model)
    hf_model = HFModel(dummy_model(model_config, config.dtype, torch.device("meta"), config.seed))
    parameters = list(hf_model.model.parameters())
    weight_bytes = sum(tensor.nbytes for tensor in itertools.chain(parameters, hf_model.model.buffers()))
    memory = _memory(config, memory_bytes)
    num_files, problems = 0, []
    if config.load_format == "auto":
        try:
            num_files = check_weights(config, hf_model.model, hf_model.language_linears)
        except BadConfig as error:
            problems.append(str(error))
    targets = [layer.weight for layer in hf_model.language_linears.values()]
    shadow_bytes = plain_bytes = sum(weight.nbytes for weight in targets)
    try:
        weight_format = format_of(config, torch.device(memory.device_type), hf_model)
    except BadConfig as error:
        problems.append(str(error))
        weight_format = None
    if weight_format is not None:
        shadow_bytes = sum(quantized_bytes(weight_format, weight.shape) for weight in targets)
        weight_bytes += shadow_bytes - plain_bytes
        if config.quantize_head:
            head = hf_model.lm_head.weight
            tied = head is hf_model.embed.weight  # the embeddings stay as loaded
            weight_bytes += quantized_bytes(weight_format, head.shape) - (0 if tied else head.nbytes)
    room = Room(memory.device_type, max(0, memory.num_bytes - weight_bytes))
    if config.switching == "in_place" or (
        config.switching == "auto" and weight_format is None and not shadow_fits(config, hf_model, room, shadow_bytes)
    ):
        shadow_bytes = 0
    shapes = {
        name: FactorShape(adapter_rank, layer.in_features, layer.out_features)
        for name, layer in hf_model.language_linears.items()
    }
    adapter_bytes = run_bytes(shapes, hf_model.dtype)
    arena_bytes, arena_basis, num_adapters, kv_tokens, wanted_pages = 0, "", 0, 0, 0
    if weight_bytes > memory.num_bytes:
        problems.append(f"its weights take {weight_bytes:,} bytes, but the memory has {memory.num_bytes:,}")
    else:
        try:
            limits = compute_limits(config, hf_model, room, shadow_bytes)
        except BadConfig as error:
            problems.append(str(error))
        else:
            arena_bytes, arena_basis = limits.num_pages * PAGE_BYTES, limits.arena_basis
            num_adapters = limits.max_adapter_pages // pages_for(adapter_bytes)
            kv_pages = limits.num_pages - min(wanted_adapters, num_adapters) * pages_for(adapter_bytes)
            kv_tokens = kv_pages // limits.block_pages * config.block_size
            wanted_pages = 2 * (wanted_adapters * pages_for(adapter_bytes) + limits.block_pages)
    text = hf_model.text_config
    return ModelCheck(
        model_type=hf_model.family.model_type,
        text_model=text.model_type,
        video=processor.takes_videos,
        takes_tools=processor.takes_tools,
        num_layers=hf_model.num_layers,
        hidden_size=hf_model.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=hf_model.num_kv_heads,
        num_parameters=sum(tensor.numel() for tensor in parameters),
        dtype=str(hf_model.dtype).removeprefix("torch."),
        quantize=config.quantize,
        weight_bytes=weight_bytes,
        max_context=min(hf_model.max_positions, config.max_context or hf_model.max_positions),
        kv_token_bytes=hf_model.num_layers * 2 * hf_model.kv_dim * hf_model.dtype.itemsize,
        device_type=memory.device_type,
        memory_bytes=memory.num_bytes,
        switching="shadow" if shadow_bytes else "in_place",
        shadow_bytes=shadow_bytes,
        arena_bytes=arena_bytes,
        arena_basis=arena_basis,
        adapter_rank=adapter_rank,
        adapter_bytes=adapter_bytes,
        num_adapters=num_adapters,
        kv_tokens=kv_tokens,
        wanted_arena_bytes=wanted_pages * PAGE_BYTES,
        num_files=num_files,
        problems=tuple(problems),
    )


def _memory(config: EngineConfig, memory_bytes: int | None) -> Room:
    """Memory of the configured device, which may be one that this machine does not have if its size is given."""
    if memory_bytes is None:
        try:
            device = device_of(config, 0)
        except BadConfig as error:
            raise BadConfig(f"{error}; to check for another machine, give the memory of its device") from error
        return free_room(config, device)
    return Room(named_device(config).type, memory_bytes)
