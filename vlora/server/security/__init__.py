"""Tokens, TLS, and limits on connections, failed authentications and message bytes."""
