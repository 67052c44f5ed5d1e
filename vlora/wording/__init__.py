"""Error messages for errors of pydantic, msgspec, PyYAML and Python's JSON parser: one module per library."""
