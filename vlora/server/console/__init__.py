"""The console: one page that shows the engine's state and sends it requests."""
