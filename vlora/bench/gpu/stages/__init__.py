"""One module per stage, with `run(context) -> dict`."""
