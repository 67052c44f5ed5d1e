"""Adapters on disk and in host memory: PEFT folders, validation, versions, and the registry.

Device memory is the subject of `vlora.lora.adapter_pool`, which this module does not import.
"""
