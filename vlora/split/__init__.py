"""The base model as a service: one process holds the frozen linear layers, and clients hold everything else.

A client runs an unmodified transformers model. `connect` finds the base executor, `Base.wrap` replaces the model's
frozen linear layers by calls to it; adapters, optimizer, KV cache, attention and norms stay with the client (Symbiosis,
section 3)::

    base = vlora.split.connect("127.0.0.1:18863")
    model = get_peft_model(base.wrap(model), LoraConfig(...))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora import lazy

if TYPE_CHECKING:
    from vlora.split.client import Base, connect
    from vlora.split.noise import Noise

__all__ = ["Base", "Noise", "connect"]

__getattr__ = lazy.attributes(
    __name__, Base="vlora.split.client", Noise="vlora.split.noise", connect="vlora.split.client"
)
