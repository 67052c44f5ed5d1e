"""An engine in a process of its own: the socket to it, the messages on it, and restarts after it ended."""
