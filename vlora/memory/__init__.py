"""One memory arena for KV cache and adapters. `books.py` and `adapter_cache.py` own its pages and import no torch."""
