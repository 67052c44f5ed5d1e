"""The RPyC service, and the protocol that restricts RPyC to plain values."""
