"""The model side of the engine: loading, the adapter to transformers' models, vision, sampling, and the runner."""
