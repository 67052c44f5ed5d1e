"""Tensor parallelism: sharding of layers and adapters over ranks, and communication between ranks."""
