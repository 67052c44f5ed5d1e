"""Images and videos: decoding, the vision tower in pieces, encoding as scheduled, and grids of image tokens."""
