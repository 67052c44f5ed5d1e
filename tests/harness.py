"""Runs prompts through a real engine and records the logits from which every token was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tests import device
from tests.families import Prompt, build_model
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models import launched_step
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState
from vlora.types import Mode, Request, SamplingParams


class FixedModes:
    """A test policy that runs all requests in a fixed mode, or in the modes of a plan, two steps each."""

    def __init__(self, mode: Mode, merged: str | None = None, plan: Sequence[tuple[Mode, str | None]] = ()) -> None:
        self.plan = list(plan) or [(mode, merged)]
        self.steps = 0

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        mode, merged = self.plan[self.steps // 2 % len(self.plan)]
        self.steps += 1
        keys = {c.adapter.rpartition("@")[0]: c.adapter for c in ready if c.adapter is not None}
        order = tuple(c.request_id for c in ready)[: state.max_batch_size]
        if merged is not None and merged not in keys:
            return Decision(Mode.UNMERGED, None, order)
        return Decision(mode, keys.get(merged) if merged else None, order)


Answers = list[tuple[list[int], torch.Tensor]]
"""For each case the tokens, and the logits from which they were chosen [tokens, vocab]."""


@dataclasses.dataclass
class Run:
    """Result of a run: tokens and logits per case, and the engine's statistics."""

    answers: Answers
    modes: set[Mode]
    num_switches: int
    num_preemptions: int
    num_loads: int
    num_resident: int


class RecordingEngine:
    """A real engine with a reference's adapters loaded. Its answers include their logits."""

    def __init__(
        self,
        reference: Any,
        policy: Policy | None,
        *,
        max_step_tokens: int = 512,
        scarce_memory: bool = False,
        dtype: torch.dtype = torch.float32,
        model: Any = None,
        checkpoint: str | None = None,
        background: bool = False,
        **settings: Any,
    ) -> None:
        """Start the engine.

        Args:
            checkpoint: A folder from which the model is loaded, instead of building it here.
            background: Only register the adapters; threads read and load them when requests need them.
            settings: See `EngineConfig`.
        """
        config = EngineConfig(
            model=checkpoint or reference.family,
            device=device.name,
            dtype=str(dtype).removeprefix("torch."),
            max_batch_size=8,
            max_step_tokens=max_step_tokens,
            block_size=8,
            # Adapters use up to half; a block is one page. Scarce memory fits about half of the requests.
            arena_bytes=(72 if scarce_memory else 1024) * PAGE_BYTES,
            merge_fidelity_floor=0.0,
            **settings,
        )
        executor = None if background else Inline()
        if checkpoint is None:
            made = model if model is not None else build_model(reference.family, dtype)
            self.local = LocalEngine(config, model=made.to(device.name), executor=executor)
        else:
            self.local = LocalEngine(config, executor=executor)
        self.engine = self.local.engine
        runner = self.engine.parts.device.runner
        alone = config.tensor_parallel == 1  # several ranks launch each kernel
        if config.cuda_graphs and alone and runner.gpu.decodes and device.name.startswith("cuda"):
            assert runner.graphs is not None, "the capture of decode steps failed"
        if policy is not None:
            self.engine.parts.scheduler.policy = policy
        if background:
            self.engine.register_adapters(reference.adapters)
        else:
            for name, path in reference.adapters.items():
                self.engine.load_adapter(name, path)
        self.modes: set[Mode] = set()
        inner_launch = self.engine.parts.device.runner.launch

        def recording_launch(batch: Any) -> Any:
            if batch.items:  # a step may also encode images only
                self.modes.add(batch.mode)
            self.engine.check_integrity()
            self.engine.parts.scheduler.check_integrity()
            return inner_launch(batch)

        self.engine.parts.device.runner.launch = recording_launch  # type: ignore[method-assign]
        self.cached_tokens: list[int] = []  # per case of the last run, the prompt tokens from the prefix cache

    def answer(self, cases: Sequence[tuple[str | None, Prompt]], num_tokens: int) -> Answers:
        """Run all cases concurrently."""
        recorded: dict[str, list[torch.Tensor]] = {}
        inner_sample = launched_step.sample

        def recording_sample(
            logits: torch.Tensor,
            params: Sequence[SamplingParams],
            seeds: Sequence[int],
            places: Sequence[int],
            draws: torch.Tensor | None = None,
        ) -> torch.Tensor:
            for row, seed in enumerate(seeds):
                recorded.setdefault(str(seed), []).append(logits[row].cpu().clone())
            return inner_sample(logits, params, seeds, places, draws)

        launched_step.sample = recording_sample
        try:
            outputs = self.local.run(
                Request(
                    request_id=f"case-{i}",
                    prompt_ids=prompt.prompt_ids,
                    vision=prompt.vision,
                    adapter=adapter,
                    # Greedy sampling ignores the seed, so it labels the case in the recording.
                    sampling=SamplingParams(max_tokens=num_tokens, seed=i, ignore_eos=True),
                )
                for i, (adapter, prompt) in enumerate(cases)
            )
        finally:
            launched_step.sample = inner_sample
        self.engine.check_integrity()
        self.cached_tokens = []
        answers = []
        for i in range(len(cases)):
            parts = outputs[f"case-{i}"]
            assert parts[-1].finish_reason == "length", parts[-1]
            assert parts[-1].timings is not None
            self.cached_tokens.append(parts[-1].timings.num_cached_tokens)
            answers.append(([token for part in parts for token in part.token_ids], torch.stack(recorded[str(i)])))
        return answers


def run_engine(
    reference: Any,
    policy: Policy | None,
    num_tokens: int,
    *,
    only: Sequence[int] | None = None,
    cases: Sequence[tuple[str | None, Prompt]] | None = None,
    **settings: Any,
) -> Run:
    """Run a reference's cases (or the given ones) concurrently and collect tokens and logits per case.

    settings: see `RecordingEngine`.
    """
    chosen = list(cases) if cases is not None else [reference.cases[i] for i in only or range(len(reference.cases))]
    recorded = RecordingEngine(reference, policy, **settings)
    answers = recorded.answer(chosen, num_tokens)
    stats = recorded.engine.stats()
    return Run(
        answers,
        recorded.modes,
        stats.num_switches,
        stats.num_preemptions,
        stats.num_adapter_loads,
        stats.num_resident_adapters,
    )
