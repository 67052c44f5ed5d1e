"""Frame streams: their state, the registry of open streams, previews."""
