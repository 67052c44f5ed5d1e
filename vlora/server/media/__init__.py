"""Images of requests: allowed sources, and decoding within limits."""
