"""Adapters on disk and in host memory: reading PEFT folders, validation, versions, the registry. No device memory
here."""

from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import HostFactors, aligned, carve
from vlora.lora.peft_format import SiteShape
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
