"""The plan of `vlora stream`: its schema, its check, and the events that ask questions."""
