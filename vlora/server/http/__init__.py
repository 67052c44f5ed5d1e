"""The HTTP API: routes, OpenAI's request and response schemas, and middleware with access checks and size limits."""
