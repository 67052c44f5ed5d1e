"""An engine over a model with random weights, for benches that run and time single steps."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, write_adapter, write_head
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.host_to_device import Inline
from vlora.models.loading import read_config
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import Mode, Request, RequestOutput, SamplingParams, VisionInput


class FixedModePolicy:
    """A policy with a fixed plan: all ready requests, over W0 or over the first request's merged weights.

    Attributes:
        merging: Whether the weights are merged. The mode is then merged if all requests use that adapter, else mixed;
            otherwise it is unmerged.
    """

    def __init__(self, *, merging: bool = False) -> None:
        self.merging = merging

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        order = tuple(c.request_id for c in ready[: state.max_batch_size])
        if not self.merging:
            return Decision(Mode.UNMERGED, None, order)
        merged = ready[0].adapter
        alone = all(c.adapter == merged for c in ready)
        return Decision(Mode.MERGED if alone else Mode.MIXED, merged, order)


class Kind(NamedTuple):
    """A kind of batch: the adapters of its requests, by turns, and whether the first one is merged."""

    name: str
    adapters: Sequence[str | None]
    merging: bool


Step = Callable[[], None]

HEAD = "head"
ACTIONS = tuple(f"action {number}" for number in range(10))
"""Labels of the heads of random adapters."""

_SETTINGS: Mapping[str, Any] = {"prefix_cache": False, "vision_cache_bytes": 0, "merge_fidelity_floor": 0.0}
_FIRST_WORD, _LAST_WORD = 3, 1000  # token ids of prompts, which no model of the benches uses for vision


class TimedEngine:
    """An engine whose requests are added and whose steps are run one by one.

    Args:
        model: A model with random weights, on its device; or a folder, whose `device` and `dtype` are settings.
        adapters: Folders by name, or ranks of random adapters. Names with one folder are adapters of their own, and so
            are those of one rank.
        heads: Whether each random adapter has a head, `HEAD`.
        context: Tokens of each request of `begin` before its first decode step.
        longest: Tokens of their answers: more than the steps that are run.
        background: Read and copy adapters in threads, as a server does.
        parts: Policy, cost model and clock, as `Engine`.
        settings: Of the configuration. By default every request computes its prompt and reads its own KV, and every
            adapter may be merged.
    """

    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, str | int] = MappingProxyType({}),
        *,
        heads: bool = False,
        context: int = 1,
        longest: int = 1,
        background: bool = False,
        parts: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        if isinstance(model, str):
            config = EngineConfig(model=model, **{**_SETTINGS, **settings})
            model_config, loaded = read_config(model), None
        else:
            device, dtype = str(model.device), str(model.dtype).removeprefix("torch.")
            config = EngineConfig(model="dummy", device=device, dtype=dtype, **{**_SETTINGS, **settings})
            model_config, loaded = model.config, model
        self._image_id: int = model_config.image_token_id
        folder = Path(tempfile.mkdtemp(prefix="vlora-bench-"))  # adapters that are evicted are read again
        weakref.finalize(self, shutil.rmtree, folder)
        of_rank = {
            rank: write_adapter(folder / f"r{rank}", language_shapes(model), rank, seed=rank, dtype=model.dtype)
            for rank in {*adapters.values()}
            if isinstance(rank, int)
        }
        for path in of_rank.values() if heads else ():
            write_head(path, HEAD, model_config.text_config.hidden_size, ACTIONS, "action", "what happens ?")
        self.engine = Engine(config, model=loaded, executor=None if background else Inline(), **parts)
        for name, source in adapters.items():
            self.engine.load_adapter(name, source if isinstance(source, str) else of_rank[source])
        self._context, self._longest = context, longest
        self._ids: list[str] = []
        self._numbers = itertools.count()
        self._draws = torch.Generator().manual_seed(0)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(
        self,
        words: int | Sequence[int],
        answer: int = 1,
        adapter: str | None = None,
        pictures: Sequence[VisionInput] = (),
        logprobs: int | None = None,
        **fields: Any,
    ) -> str:
        """Add a request. Returns its id.

        Args:
            words: The tokens of its text, or their number. A token stands before each picture.
            answer: Tokens of the answer.
            logprobs: Most likely tokens of each place that are reported.
            fields: Further ones of `Request`.
        """
        if isinstance(words, int):
            words = torch.randint(_FIRST_WORD, _LAST_WORD, (words,), generator=self._draws).tolist()
        shown = [token for each in pictures for token in (_FIRST_WORD, *[self._image_id] * each.num_tokens)]
        request = Request(
            prompt_ids=(*shown, *words),
            adapter=adapter,
            sampling=SamplingParams(max_tokens=answer, ignore_eos=True, logprobs=logprobs),
            **{"request_id": str(next(self._numbers)), "vision": tuple(pictures), **fields},
        )
        self.engine.add(request)
        return request.request_id

    def step(self) -> tuple[RequestOutput, ...]:
        outputs = self.engine.step()
        for output in outputs:
            assert output.error is None, output.error
        return outputs

    def timed_step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        started = clock()
        self.step()
        return clock() - started

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def begin(self, adapters: Sequence[str | None]) -> Step:
        """Prefill one request per adapter, ending earlier ones. The returned call runs one decode step of these
        requests, or of those that are kept.
        """
        self.keep(0)
        self._prefill(adapters, self._context, self._longest)
        self.step()  # a GPU's engine answers with the tokens of a step when it has launched the next one

        def step() -> None:
            outputs = self.step()
            assert len(outputs) == len(self._ids), f"{len(outputs)} of {len(self._ids)} requests were answered"

        return step

    def prefill(self, adapters: Sequence[str | None], num_tokens: int) -> None:
        """Answer one token to a prompt per adapter, with `num_tokens` prompt tokens in total. No request may run."""
        self._prefill(adapters, num_tokens // len(adapters), 1)
        self._ids.clear()

    def keep(self, batch: int) -> None:
        """End all requests except the first `batch`."""
        for request_id in self._ids[batch:]:
            self.engine.cancel(request_id)
        del self._ids[batch:]

    def _prefill(self, adapters: Sequence[str | None], num_tokens: int, answer: int) -> None:
        """Add a request per adapter, and run steps until each has its first token."""
        self._ids += [self.add(num_tokens, answer, adapter) for adapter in adapters]
        answered: set[str] = set()
        while len(answered) < len(self._ids):
            answered.update(output.request_id for output in self.step())
