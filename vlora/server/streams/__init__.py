"""Streams of frames: their state, the registry of open ones, previews."""
