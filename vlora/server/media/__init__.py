"""Images of requests: where they may come from, and decoding within limits."""
