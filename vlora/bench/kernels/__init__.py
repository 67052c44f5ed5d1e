"""The operator ATMM against other ways to add many adapters' deltas (`vlora bench atmm`)."""
