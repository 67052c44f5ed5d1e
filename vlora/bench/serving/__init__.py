"""Benches of a running server over HTTP and RPyC, and their clients."""
