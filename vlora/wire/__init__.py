"""Connections between this project's processes: framing, TLS, proof of a shared secret, signs of life.

Used by an engine's process and its front end (`vlora.engine.ipc`), replicas and heads (`vlora.cluster`), and base
executors with their clients (`vlora.split`).
"""
