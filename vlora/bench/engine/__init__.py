"""Benches of one engine: its steps, merging, adapter loading, caches, images and task heads."""
