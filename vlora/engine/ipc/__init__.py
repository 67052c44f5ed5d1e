"""An engine in its own process: the socket to it, the messages on it, and restarts after it dies."""
