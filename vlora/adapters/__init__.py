"""Adapters on disk and in host memory: reading PEFT folders, validation, versions, the registry. No device memory
here."""

from vlora.adapters.host import HostAdapter
from vlora.adapters.layout import HostFactors, aligned, carve
from vlora.adapters.peft_format import SiteShape
from vlora.adapters.registry import AdapterRegistry, Registration

__all__ = [
    "AdapterRegistry",
    "HostAdapter",
    "HostFactors",
    "Registration",
    "SiteShape",
    "aligned",
    "carve",
]
