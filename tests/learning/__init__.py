"""Adapters that learn while they serve."""
