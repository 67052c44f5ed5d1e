"""Tests that need Triton's interpreter from the start of their process; `tests/atmm/test_triton.py` runs them."""
