"""One memory arena for KV cache and adapters. `books.py` and `residency.py` (who owns which page) import no torch."""
