"""The settings of `vlora base serve`."""

from __future__ import annotations

import dataclasses

from vlora.config import check_settings, setting
from vlora.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """What `vlora base serve` serves to such clients, and how it computes their calls. Raises BadConfig."""

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    shard: str = setting("1/1", "Batching", "I/N: one of N shards of every layer; clients connect to all of them.")
    join_rows: int = setting(64, "Batching", "Compute calls with more rows by themselves.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        index, _, number = self.shard.partition("/")
        if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
            raise BadConfig(f"--shard is {self.shard!r}; write I/N, such as 1/2 and 2/2")

    @property
    def part(self) -> tuple[int, int]:
        """The index of the shard, from 0, and the number of shards."""
        index, _, number = self.shard.partition("/")
        return int(index) - 1, int(number)
