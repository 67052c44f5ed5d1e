"""The plan file: its schema, errors with file and line, and `--check`."""
