"""Training of one adapter with its heads, and the cache of finished trainings."""
