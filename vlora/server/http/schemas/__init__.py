"""JSON schemas of requests, in a form that the grammar library follows exactly."""
