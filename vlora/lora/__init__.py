"""Adapters on disk and in host memory: PEFT folders, validation, versions, and the registry.

Device memory is the subject of `vlora.lora.adapter_pool`, which this module does not import.
"""

from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import HostFactors, aligned, carve
from vlora.lora.peft_target import SiteShape
from vlora.lora.registry import AdapterRegistry, Registration

__all__ = [
    "AdapterRegistry",
    "HostAdapter",
    "HostFactors",
    "Registration",
    "SiteShape",
    "aligned",
    "carve",
]
