"""YAML plans of users: strict fields, and errors with file, line and field. Shared by `fusion` and `apps`."""
