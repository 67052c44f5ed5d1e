"""Learning adapters in the server: which answers are kept, and how versions are evaluated."""
