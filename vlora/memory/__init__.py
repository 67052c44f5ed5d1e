"""One memory arena for KV cache and adapters. `books.py` and `adapter_cache.py` track page ownership without torch."""
