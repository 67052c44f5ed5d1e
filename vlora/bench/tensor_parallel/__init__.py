"""Adapters on several ranks (`vlora bench tp`)."""
