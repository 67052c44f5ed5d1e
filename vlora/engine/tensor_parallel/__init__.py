"""Several ranks as one engine: rank 0 coordinates, each other rank is a worker process."""
