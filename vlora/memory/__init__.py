"""One memory arena for KV cache and adapters. The bookkeeping works without torch."""
