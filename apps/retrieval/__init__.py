"""Retrieval: an index of videos and pictures, searched in words and ranked by words, heads and the model.

::

    from apps.retrieval import RetrievalIndex, make_settings, search, update_index
    from vlora.client import Client

    with Client() as client, RetrievalIndex(Path("index.sqlite"), make_settings(client)) as index:
        update_index(client, index, ["videos/"])
        for hit in search(client, index, "a white car turning left", adapter="traffic")[:10]:
            print(hit.score, hit.source, hit.start_s, hit.why())
"""

from apps.retrieval.contact_sheet import check_sheet, clock, write_sheet
from apps.retrieval.indexing import IndexCounts, IndexedClip, describing_adapters, make_settings, update_index
from apps.retrieval.media import encoded_picture
from apps.retrieval.ranking import NUM_CANDIDATES, Hit, clips_inside, search, search_like
from apps.retrieval.store import IndexSettings, RetrievalIndex, Statement, check_settings

__all__ = [
    "NUM_CANDIDATES",
    "Hit",
    "IndexCounts",
    "IndexSettings",
    "IndexedClip",
    "RetrievalIndex",
    "Statement",
    "check_settings",
    "check_sheet",
    "clips_inside",
    "clock",
    "describing_adapters",
    "encoded_picture",
    "make_settings",
    "search",
    "search_like",
    "update_index",
    "write_sheet",
]
