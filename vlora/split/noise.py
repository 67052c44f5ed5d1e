"""Noise on what a client sends, and its effect taken off what comes back (Symbiosis, section 3.8).

The products are linear, so the result is exact up to rounding. The base executor sees x + n instead of x. What that is
worth depends on the process that computes the effect of n:

* A second executor that does not share what it sees with the first: the noise is fresh in every call. Neither of them
  sees both n and x + n. A value with noise of `scale` times its size carries at most log2(1 + 1 / scale^2) / 2 bits to
  the base in each call. That is a bound, not secrecy: m calls with the same rows divide the noise by sqrt(m) when they
  are averaged.
* The base itself, once for each noise of a pool, as in the paper. THIS PROTECTS NOTHING against a base that records
  what it computes: it has seen every n, and the nearest one gives x (tests/split/test_executor.py does so in all
  attempts, for any size of the pool). It hides activations only from an observer of the calls that does not know it.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence

import msgspec
import torch

from vlora.errors import BadConfig
from vlora.split.connection import BaseConnection, LayerCalls
from vlora.split.frames import Direction, Group

log = logging.getLogger(__name__)

_MAX_SCALE = {torch.float32: 1000.0, torch.float16: 8.0, torch.bfloat16: 1.0}
"""Above it, rounding x + n loses more than some thousandths of x; in bfloat16 4e-3 at 1, and 3e-2 at 10."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Gaussian noise on all rows that are sent.

    Args:
        scale: Standard deviation relative to the root mean square of the rows; at most 1 for a base in bfloat16.
        second: Address of a second executor of the same base, which only sees noise. It serves whole layers, also where
            the base is divided into shards.
        pool: Number of noises; the base itself computes their effects. It protects nothing against the base.

    Raises:
        BadConfig: A value is invalid, or there is not exactly one of `second` and `pool`.
    """

    scale: float = 1.0
    second: str | None = None
    pool: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.scale <= max(_MAX_SCALE.values()):
            raise BadConfig(f"noise scale is {self.scale}; it must be above 0 and at most {max(_MAX_SCALE.values()):g}")
        if self.pool < 0 or (self.second is None) == (self.pool == 0):
            raise BadConfig("noise needs either the address of a second executor (second=), or a pool (pool=)")


_Prepared = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Noise for each input of a call, and its effect on each output."""


class NoisyCalls:
    """Calls with noise. See `LayerCalls`."""

    def __init__(self, calls: LayerCalls, noise: Noise, second: LayerCalls | None) -> None:
        """Check that the effects of noise will be exact enough.

        Args:
            second: Computes the effects of fresh noise; None for a pool.

        Raises:
            BadConfig: The noise is too large for the base's type, or the second executor has another base.
        """
        limit = _MAX_SCALE[calls.dtype]
        if noise.scale > limit:
            raise BadConfig(
                f"noise scale is {noise.scale:g}; for a base in {str(calls.dtype).removeprefix('torch.')} it is at "
                f"most {limit:g}, because rounding would destroy the activations"
            )
        if second is not None and (second.dtype != calls.dtype or not _alike(second.groups, calls.groups)):
            raise BadConfig(
                "the second executor serves another base model, or one shard of it; it must serve all of the same base"
            )
        if second is None:
            log.warning(
                "a pool of %d noises does not hide activations from the base executor, which computes their effects; "
                "use Noise(second=ADDRESS) against it",
                noise.pool,
            )
        self.dtype = calls.dtype
        self.groups: Sequence[Group] = calls.groups
        self._calls = calls
        self._noise = noise
        self._second = second
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))
        self._pools: dict[tuple[Direction, int, int], list[_Prepared]] = {}

    def close(self) -> None:
        self._calls.close()
        if self._second is not None:
            self._second.close()

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        rows = len(inputs[0])
        if self._second is not None:
            noises, effects = self._prepare(self._second, direction, group, mask, inputs)
        else:
            noises, effects = self._of_pool(direction, group, mask, inputs)
        noisy = [x + noise[:rows] for x, noise in zip(inputs, noises, strict=True)]
        made = self._calls.call(direction, group, mask, noisy)
        return [y - effect[:rows] for y, effect in zip(made, effects, strict=True)]

    def _of_pool(self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]) -> _Prepared:
        pool = self._pools.setdefault((direction, group, mask), [])
        if pool and len(pool[0][0][0]) < len(inputs[0]):
            pool.clear()  # too few rows
        while len(pool) < self._noise.pool:
            pool.append(self._prepare(self._calls, direction, group, mask, inputs))
        return pool[int(torch.randint(len(pool), (), generator=self._generator))]

    def _prepare(
        self, calls: LayerCalls, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> _Prepared:
        """Draw noise of the size of the inputs, and let an executor compute its effect, which has no bias."""
        noises = []
        for x in inputs:
            size = self._noise.scale * x.detach().float().square().mean().sqrt()
            noises.append((torch.randn(x.shape, generator=self._generator) * size).to(self.dtype))
        linear = Direction.BACKWARD if direction == Direction.BACKWARD else Direction.WITHOUT_BIAS
        return noises, calls.call(linear, group, mask, noises)


def require_another(base: Sequence[BaseConnection], second: BaseConnection, address: str) -> None:
    """Raise BadConfig if the second executor is the base, at whichever address: it would see noise and sum."""
    if second.info.instance in [each.info.instance for each in base]:
        raise BadConfig(f"the second executor {address!r} is the base itself; noise needs another one")


def _alike(groups: Sequence[Group], others: Sequence[Group]) -> bool:
    """Whether layers have equal names, shapes and weights. A layer that shards hold together has no digest."""

    def without_digests(given: Sequence[Group]) -> list[Group]:
        return [tuple(msgspec.structs.replace(layer, digest=b"") for layer in group) for group in given]

    return without_digests(groups) == without_digests(others) and all(
        layer.digest == other.digest
        for group, other_group in zip(groups, others, strict=True)
        for layer, other in zip(group, other_group, strict=True)
        if layer.digest and other.digest
    )
