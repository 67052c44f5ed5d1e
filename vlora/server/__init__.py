"""The front end (checks, images, text), its RPyC and HTTP servers, and the launcher of `vlora serve`."""
