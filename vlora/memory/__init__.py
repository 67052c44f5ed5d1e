"""One memory arena for KV cache and adapters. The books (who owns which page) import no torch; `arena.py` holds the bytes."""
