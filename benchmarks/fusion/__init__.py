"""The packings of `vlora fuse` against others, and their domains."""
