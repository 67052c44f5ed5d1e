"""The front end: checks, images, text; RPyC and HTTP over it; `vlora serve`'s supervisor."""
