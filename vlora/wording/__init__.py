"""What pydantic, msgspec, PyYAML and Python's JSON reader refuse, in this project's words: one module per library."""
