"""Video analytics: cuts files, cameras, network streams and folders into clips, queries task heads and asks
questions, writes the results.

::

    from apps.video_analytics import find_sources, run
    from vlora.client import Client

    with Client() as client:
        run(client, find_sources(["street.mp4", "rtsp://camera-7/main"]), "traffic", "jam", out=Path("results"))
"""

from apps.video_analytics.analysis import run
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import CHUNKS_IN_FLIGHT, ChunkResult, analyse
from apps.video_analytics.sampling import CHUNK_S, Chunk, ClipShape
from apps.video_analytics.sources import Source, find_sources, read_clips

__all__ = [
    "CHUNKS_IN_FLIGHT",
    "CHUNK_S",
    "AnnotatedVideo",
    "Chunk",
    "ChunkResult",
    "ClipShape",
    "Source",
    "analyse",
    "find_sources",
    "read_clips",
    "run",
]
