"""Split execution: memory, speed and batching of clients beside one base executor."""
