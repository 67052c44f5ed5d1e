"""An engine that runs individual steps of requests with a given context, for benches that time steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.host_to_device import Inline
from vlora.orchestrator import Candidate, Decision, PolicyState
from vlora.orchestrator.policies.base import Policy
from vlora.types import Mode, Request, SamplingParams


class FixedModePolicy:
    """A policy with a fixed plan: all ready requests, over W0 or over the first request's merged weights.

    Attributes:
        merging: Whether the weights are merged. The mode is then merged if all requests use that adapter, else mixed;
            otherwise it is unmerged.
    """

    def __init__(self) -> None:
        self.merging = False

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        order = tuple(c.request_id for c in ready[: state.max_batch_size])
        if not self.merging:
            return Decision(Mode.UNMERGED, None, order)
        merged = ready[0].adapter
        alone = all(c.adapter == merged for c in ready)
        return Decision(Mode.MERGED if alone else Mode.MIXED, merged, order)


Step = Callable[[], None]

_FIRST_WORD, _LAST_WORD = 3, 1000  # token ids of prompts, which no model of the benches uses for vision


class TimedEngine:
    """An engine with loaded adapters.

    Args:
        config: Without prefix cache, so that each request of a batch reads its own KV.
        model: The model, with random weights.
        adapters: Folders by name. Names with one folder are adapters of their own.
        context: Tokens of each request before its first decode step.
        longest: Tokens of an answer: more than the steps that are run.
        policy: As `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: object,
        adapters: Mapping[str, str],
        *,
        context: int,
        longest: int,
        policy: Policy | None = None,
    ) -> None:
        self.engine = Engine(config, model=model, executor=Inline(), policy=policy)
        for name, path in adapters.items():
            self.engine.load_adapter(name, path)
        self._context, self._longest = context, longest
        self._ids: list[str] = []
        self._num_begun = 0

    def begin(self, adapters: Sequence[str | None]) -> Step:
        """Prefill one request per adapter, ending earlier ones. The returned call runs one decode step of these
        requests, or of those that are kept.
        """
        self.keep(0)
        self._add(adapters, self._context, self._longest)
        self._step()  # a GPU's engine answers with the tokens of a step when it has launched the next one

        def step() -> None:
            outputs = self._step()
            assert len(outputs) == len(self._ids), f"{len(outputs)} of {len(self._ids)} requests were answered"

        return step

    def prefill(self, adapters: Sequence[str | None], num_tokens: int) -> None:
        """Answer one token to a prompt per adapter, with `num_tokens` prompt tokens in total. No request may run."""
        self._add(adapters, num_tokens // len(adapters), 1)
        self._ids.clear()

    def keep(self, batch: int) -> None:
        """End all requests except the first `batch`."""
        for request_id in self._ids[batch:]:
            self.engine.cancel(request_id)
        del self._ids[batch:]

    def _add(self, adapters: Sequence[str | None], num_tokens: int, longest: int) -> None:
        """Add a request per adapter, and run steps until each has its first token."""
        generator = torch.Generator().manual_seed(0)
        for adapter in adapters:
            prompt = torch.randint(_FIRST_WORD, _LAST_WORD, (num_tokens,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=longest, ignore_eos=True)
            request_id = f"{self._num_begun}"
            self._num_begun += 1
            self._ids.append(request_id)
            self.engine.add(
                Request(request_id=request_id, prompt_ids=tuple(prompt), adapter=adapter, sampling=sampling)
            )
        answered: set[str] = set()
        while len(answered) < len(self._ids):
            answered.update(self._step())

    def _step(self) -> list[str]:
        outputs = self.engine.step()
        for output in outputs:
            assert output.error is None, output.error
        return [output.request_id for output in outputs]
