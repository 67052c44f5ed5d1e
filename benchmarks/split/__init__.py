"""The bench of split execution: memory, speed and batching of clients beside one base executor."""
