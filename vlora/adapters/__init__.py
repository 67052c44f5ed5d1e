"""Adapters on disk and in host memory: reading PEFT folders, validation, versions, the registry. No device memory
here."""

from vlora.adapters.host import HostAdapter, HostFactors, load_adapter
from vlora.adapters.peft_format import AdapterHeader, SiteShape, read_header
from vlora.adapters.registry import AdapterRegistry

__all__ = [
    "AdapterHeader",
    "AdapterRegistry",
    "HostAdapter",
    "HostFactors",
    "SiteShape",
    "load_adapter",
    "read_header",
]
