"""Layers of an adapter's file that are several layers of the base model.

Qwen-VL's published code computes queries, keys and values by one layer, `c_attn`. Its outputs are those of q_proj,
k_proj and v_proj, one below the other, so each of these gets the whole A and its own rows of B, exactly.
"""

from __future__ import annotations

import dataclasses
import itertools

from vlora.errors import BadAdapter
from vlora.lora.legacy_names import fused_sites
from vlora.lora.peft_target import ROWS, Part, StoredLayer, TargetHeader, read_target

# Tensors of a layer with a row per output; so has IA3's vector, unless it is over inputs.
_BY_OUTPUT = frozenset(("lora_B.weight", *ROWS))


def read_targets(layer: StoredLayer) -> tuple[TargetHeader, ...]:
    """Check one layer of an adapter's file. Raises BadAdapter with the reason if it cannot be served.

    Returns:
        A header for each of the base model's layers that it is.
    """
    path, config, module, parts, shapes, sites = layer
    names = fused_sites(module, sites)
    if not names:
        return (read_target(layer),)
    ends = tuple(itertools.accumulate(sites[name].d_out for name in names))
    by_output = {
        parts[part] for part in parts if part in _BY_OUTPUT or (part == "ia3_l" and shapes[parts[part]][-1:] == (1,))
    }
    for tensor in by_output:
        if shapes[tensor][:1] != ends[-1:]:
            raise BadAdapter(
                f"{path}: tensor {tensor!r} has shape {shapes[tensor]}, but this base model's {module!r} has "
                f"{ends[-1]} outputs; the adapter was made for another model"
            )
    headers: list[TargetHeader] = []
    for name, start, stop in zip(names, (0, *ends), ends, strict=False):
        own = {
            tensor: (stop - start, *shapes[tensor][1:]) if tensor in by_output else shapes[tensor]
            for tensor in parts.values()
        }
        site = dataclasses.replace(sites[name], part=Part(name, start, stop))
        header = read_target(StoredLayer(path, config, module, parts, own, {module: site}))
        if header.blocks is not None:
            raise BadAdapter(f"{path}: use_bdlora is not supported for {module!r}, which is several layers here")
        headers.append(header)
    return tuple(headers)
