"""The report of a run: JSON, tables, and one HTML page."""
