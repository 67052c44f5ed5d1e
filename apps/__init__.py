"""Applications built on the public client: video analytics, and the demonstration of the whole pipeline."""
