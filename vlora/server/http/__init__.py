"""The HTTP API: routes, request and response schemas of OpenAI's API, limits before the routes."""
