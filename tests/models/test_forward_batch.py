"""The order of a packed batch: which requests' tokens are adjacent."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlora.models.forward_batch import lane_by_lane
from vlora.types import BatchItem


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[BatchItem], str | None]:
    adapters = draw(st.lists(st.sampled_from([None, "a", "b", "c", "d", "e"]), min_size=1, max_size=20))
    sizes = draw(st.lists(st.integers(1, 70), min_size=len(adapters), max_size=len(adapters)))
    items = [
        BatchItem(str(place), adapter, 0, size, (), True)
        for place, (adapter, size) in enumerate(zip(adapters, sizes, strict=True))
    ]
    return items, draw(st.sampled_from([None, "a", "b", "f"]))


@given(batches())
def test_tokens_are_sorted_by_adapter_short_lanes_first_the_merged_one_last(
    batch: tuple[list[BatchItem], str | None],
) -> None:
    items, merged = batch
    ordered = lane_by_lane(items, merged)
    assert sorted(map(items.index, ordered)) == list(range(len(items)))
    runs = [(adapter, list(run)) for adapter, run in itertools.groupby(ordered, key=lambda item: item.adapter)]
    assert len({adapter for adapter, _ in runs}) == len(runs)
    if merged is not None and merged in dict(runs):
        assert runs.pop()[0] == merged
    lengths = [sum(item.num_tokens for item in run) for _, run in runs]
    assert lengths == sorted(lengths)
