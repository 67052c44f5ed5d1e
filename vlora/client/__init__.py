"""The client that camera boxes install: sync and asyncio, without torch, numpy or transformers."""

from vlora.client.aio import AsyncClient
from vlora.client.sync import Client, TextStream
from vlora.client.values import Answer, HeadResult

__all__ = ["Answer", "AsyncClient", "Client", "HeadResult", "TextStream"]
