"""The client library: blocking and asyncio, without torch, numpy or transformers."""

from vlora.client.aio import AsyncClient
from vlora.client.frame_stream import AsyncFrameStream, FrameStream
from vlora.client.sync import Client, TextStream, wait_for_server
from vlora.client.values import Answer, FrameAnswer, FrameResult, HeadResult, TextQuestion
from vlora.types.video import Video, VideoFile

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncFrameStream",
    "Client",
    "FrameAnswer",
    "FrameResult",
    "FrameStream",
    "HeadResult",
    "TextQuestion",
    "TextStream",
    "Video",
    "VideoFile",
    "wait_for_server",
]
