"""The cost of an adapter on several ranks by its layout: BD-LoRA's figure 5.

Three adapters with about the same number of parameters: a dense one `replicated` (Punica) or split (`slora`), and a
block-diagonal one (`bd`) of a higher rank. Decode steps of a full batch with one adapter, and a prompt, as in the
paper. On a CPU, two ranks of one thread each, with slower networks emulated by a delay in every collective; on GPUs,
all available ranks over NCCL (not measured yet).

The first two are layouts of one adapter, of which `auto` is the first. A block-diagonal adapter is a different adapter,
trained or converted to this form: the report shows its step next to the replicated one's.

One engine has all adapters, and requests for each of them; its policy serves those of one adapter in a step.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, ranks_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.engine.tensor_parallel import worker
from vlora.errors import BadConfig
from vlora.models.loading import dummy_model
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.parallel.layer_sharding import ROW_PARALLEL
from vlora.parallel.process_group import ProcessGroup
from vlora.types import Mode

LATENCIES_US = (0, 200, 1000)
_KINDS = ("replicated", "slora", "bd")
_RANKS = (16, 64, 256)
_BATCHES = (1, 64)
_DTYPE = "bfloat16"
_NUM_LAYERS = 4
_CONTEXT, _PROMPT = 16, 256  # tokens
_BASE = "base"  # the model without an adapter
_WITHIN = 1.05  # relative to the faster layout, for `auto`

Shapes = Mapping[str, tuple[int, int]]


def cases(quick: bool, latencies_us: Sequence[int] = ()) -> dict[str, tuple[bool, Sequence[int]]]:
    return {"all": (quick, latencies_us)}


def measure(case: tuple[bool, Sequence[int]]) -> Measured:
    quick, latencies_us = case
    num_gpus = torch.cuda.device_count()
    on_gpu = num_gpus > 1
    if on_gpu and latencies_us:
        raise BadConfig(
            "latencies can be added between ranks on a CPU only; GPUs are measured without: remove --latency-us"
        )
    size = 2 ** (num_gpus.bit_length() - 1) if on_gpu else 2
    latencies = (0,) if on_gpu else tuple(latencies_us) or (LATENCIES_US[::2] if quick else LATENCIES_US)
    model_config: Any = ranks_config(_NUM_LAYERS)
    whole = dummy_model(model_config, _DTYPE, torch.device("meta"), seed=0)
    shapes, whole_bytes = language_shapes(whole), sum(parameter.nbytes for parameter in whole.parameters())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(f"{folder}/model")
        adapters = _write_adapters(Path(folder), shapes, size)
        for latency_us in latencies:
            engine = RanksEngine(
                f"{folder}/model", adapters, 1e-6 * latency_us, size, max(_BATCHES), device="cuda" if on_gpu else "cpu"
            )
            for batch in _BATCHES:
                rows += rows_of("decode", batch, batch, latency_us, engine.decode(batch, 5 if quick else 15))
            rows += rows_of("prefill", 1, _PROMPT, latency_us, engine.prefill(_PROMPT, 3 if quick else 9))
            memory = engine.memory()
            engine.close()
    found = {
        "model": f"{_NUM_LAYERS} layers of hidden size {model_config.text_config.hidden_size}, {_DTYPE}, {size} ranks",
        "bytes a rank": memory,
        "weight bytes of all ranks' model": whole_bytes,
    }
    return Measured(rows, found, goals_of(rows))


def _write_adapters(folder: Path, shapes: Shapes, size: int) -> dict[str, RankAdapter]:
    """Write every kind at every rank; block-diagonal ones at the rank with about the same number of parameters."""
    adapters: dict[str, RankAdapter] = {}
    for rank in _RANKS:
        dense = write_adapter(folder / f"dense-{rank}", shapes, rank, seed=rank)
        adapters[f"replicated-{rank}"] = RankAdapter(dense, "replicated")
        adapters[f"slora-{rank}"] = RankAdapter(dense, "slora")
        blocks = write_adapter(folder / f"bd-{rank}", shapes, bd_rank(rank, shapes, size), rank, num_blocks=size)
        adapters[f"bd-{rank}"] = RankAdapter(blocks, "replicated")
    return adapters


def bd_rank(rank: int, shapes: Shapes, num_blocks: int) -> int:
    """The rank of a block-diagonal adapter with about as many parameters as a dense one of `rank`."""
    dense = sum(d_out + d_in for d_out, d_in in shapes.values())
    blocks = sum(
        d_out + d_in / num_blocks if name.endswith(ROW_PARALLEL) else d_out / num_blocks + d_in
        for name, (d_out, d_in) in shapes.items()
    )
    return num_blocks * round(rank * dense / blocks / num_blocks)


def rows_of(
    phase: str, batch: int, num_tokens: int, latency_us: int, seconds: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """A row for each rank. seconds: of each adapter's steps, by round."""
    rows = []
    for rank in _RANKS:
        taken = {kind: seconds[f"{kind}-{rank}"] for kind in _KINDS}
        rows.append(
            {
                "phase": phase,
                "batch": batch,
                "tokens": num_tokens,
                "latency us": latency_us,
                "rank": rank,
                "base ms": median_ms(seconds[_BASE]),
                **{f"{kind} / base": median_ratio(taken[kind], seconds[_BASE]) for kind in _KINDS},
                "slora / replicated": median_ratio(taken["slora"], taken["replicated"]),
                "auto / other": median_ratio(taken["replicated"], taken["slora"]),
                "auto / bd": median_ratio(taken["replicated"], taken["bd"]),
            }
        )
    return rows


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Limits for `auto`, which replicates, relative to the other layout of the same adapter, by phase and batch: at
    every rank and latency. Below 1 it is faster.
    """
    of = [(row["phase"], row["batch"]) for row in rows]
    return [
        Goal(
            f"auto / other, {phase}, batch {batch}, at worst",
            max(row["auto / other"] for row, key in zip(rows, of, strict=True) if key == (phase, batch)),
            _WITHIN,
            True,
        )
        for phase, batch in dict.fromkeys(of)
    ]


BENCH = Bench(name="tp", cases=cases, measure=measure, options=frozenset({"latencies_us"}))


# -- ranks -------------------------------------------------------------------------------------------------------------

_SLEEP_OVERRUN_S = 1e-4
_COLLECTIVES = ("all_reduce", "all_gather")  # of the forward


class RankAdapter(NamedTuple):
    """path: of its folder. sharding: the layout of its factors on ranks, if they are dense."""

    path: str
    sharding: ShardingKind


class _Chosen:
    """A policy that runs the chosen requests only."""

    requests: Sequence[str] = ()

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        wanted = set(self.requests)
        return Decision(Mode.UNMERGED, None, tuple(each.request_id for each in ready if each.request_id in wanted))


class RanksEngine:
    """An engine over `size` ranks, with `most` decoding requests for each adapter and for the base model.

    latency_s: the emulated delay of every collective.
    """

    def __init__(
        self, model: str, adapters: Mapping[str, RankAdapter], latency_s: float, size: int, most: int, **settings: Any
    ) -> None:
        self._policy = _Chosen()
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(_delayed(latency_s))
        fixed = {"load_format": "dummy", "dtype": _DTYPE, "threads": 1, "arena_bytes": 1280 * 2**20}
        self._timed = TimedEngine(
            model,
            {name: adapter.path for name, adapter in adapters.items()},
            parts={"policy": self._policy},
            tensor_parallel=size,
            sharding=tuple(f"{name}={adapter.sharding}" for name, adapter in adapters.items()),
            max_batch_size=most,
            max_step_tokens=max(most * _CONTEXT, _PROMPT),
            **{**fixed, **settings},
        )
        self._names: dict[str, str | None] = {_BASE: None, **{name: name for name in adapters}}
        self._requests: dict[str, Sequence[str]] = {}
        for name, adapter in self._names.items():
            self._requests[name] = self._policy.requests = [
                self._timed.add(_CONTEXT, 1000, adapter) for _ in range(most)
            ]
            left = {*self._policy.requests}
            while left:  # other ranks load an adapter meanwhile, and earlier requests run
                left -= {output.request_id for output in self._timed.step()}

    def decode(self, batch: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of decode steps of each adapter's first requests."""
        return self._compare(lambda name: self._run(self._requests[name][:batch]), rounds)

    def prefill(self, num_tokens: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of a prompt for each adapter."""
        return self._compare(lambda name: self._run([self._timed.add(num_tokens, 1, self._names[name])]), rounds)

    def memory(self) -> dict[str, Any]:
        """Bytes of rank 0."""
        model = self._timed.engine.parts.device.hf_model.model
        adapters = {each.name: each.num_bytes for each in self._timed.engine.adapters()}
        return {"weights": sum(parameter.nbytes for parameter in model.parameters()), "adapters": adapters}

    def close(self) -> None:
        self._timed.engine.close()
        self._closing.close()

    def _compare(self, run: Callable[[str], None], rounds: int) -> dict[str, list[float]]:
        """In random order, because each adapter leaves the caches in a different state."""
        calls = {name: functools.partial(run, name) for name in self._names}
        return interleaved(calls, rounds, warmup=1, clock=time.perf_counter, shuffled=True)

    def _run(self, requests: Sequence[str]) -> None:
        """A step of these requests."""
        self._policy.requests = requests
        answered = [output.request_id for output in self._timed.step()]
        assert sorted(answered) == sorted(requests), f"{len(answered)} requests ran instead of {len(requests)}"


@contextlib.contextmanager
def _delayed(latency_s: float) -> Iterator[None]:
    """A slower network: each collective of the forward takes longer, on this rank and on those that start meanwhile."""
    plain, main = {name: getattr(ProcessGroup, name) for name in _COLLECTIVES}, worker.main
    _delay(latency_s)
    worker.main = functools.partial(_delayed_main, latency_s)
    try:
        yield
    finally:
        for name, call in plain.items():
            setattr(ProcessGroup, name, call)
        worker.main = main


def _delayed_main(latency_s: float, *arguments: Any) -> None:
    _delay(latency_s)
    worker.main(*arguments)


def _delay(latency_s: float) -> None:
    """In this process. It sleeps, because ranks may share cores and a spinning rank soon has to wait for a core; then
    it spins to the end, because a sleep overruns.
    """

    def delayed(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(call)
        def slower(*arguments: Any) -> torch.Tensor:
            tensor = call(*arguments)
            until = time.perf_counter() + latency_s
            if latency_s > _SLEEP_OVERRUN_S:
                time.sleep(latency_s - _SLEEP_OVERRUN_S)
            while latency_s and time.perf_counter() < until:
                pass
            return tensor

        return slower

    for name in _COLLECTIVES:
        setattr(ProcessGroup, name, delayed(getattr(ProcessGroup, name)))
