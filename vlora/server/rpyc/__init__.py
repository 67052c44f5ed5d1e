"""The RPyC service, and a protocol that restricts RPyC to plain values."""
