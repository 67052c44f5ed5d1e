"""`vlora bench packed`: processor time of training several adapters in one packed batch, beside plain PEFT.

Every figure is the processor time of a token, with one thread, from batches to updated parameters. Plain PEFT trains
one adapter after the other, each batch padded to its longest sample, on the same weights in the same process and by
turns, so that other load on the machine cancels out.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2VLForConditionalGeneration

from vlora.bench.dummy import ranks_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, threads
from vlora.models.hf_model import HFModel
from vlora.training.adapter import LoraSettings
from vlora.training.batch import Sample
from vlora.training.trainer import PackedTrainer

SETTINGS = LoraSettings(rank=8, alpha=16, learning_rate=1e-3)
"""Rank 8 on q, k, v and o: LoRA 3 of the Symbiosis paper's table 2."""

PLAIN = "plain PEFT"
COMPARED = 4
"""Adapters of the goals."""


class Case(NamedTuple):
    """An adapter's batch: number of samples, and the range of their lengths. goal: of plain PEFT's time over ours."""

    samples: int
    shortest: int
    longest: int
    goal: float | None


CASES = {
    "4 tokens": Case(1, 4, 4, None),
    "16 tokens": Case(1, 16, 16, 1.4),
    "128 tokens": Case(2, 64, 64, 1.05),
    "ragged, 4 x 16 to 64 tokens": Case(4, 16, 64, 1.4),
}


class Size(NamedTuple):
    layers: int
    cases: tuple[str, ...]
    adapters: tuple[int, ...]
    rounds: int


FULL = Size(layers=8, cases=tuple(CASES), adapters=(1, 2, 4, 8), rounds=7)
QUICK = Size(layers=2, cases=tuple(name for name, case in CASES.items() if case.goal), adapters=(1, 4), rounds=3)

Batch = Sequence[torch.Tensor]
"""The samples of one adapter, tokens [n] each. All tokens but the first are learned."""


def measure_all(quick: bool) -> Measured:
    size = QUICK if quick else FULL
    rows: list[dict[str, Any]] = []
    with threads(1):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(ranks_config(size.layers)).requires_grad_(False).eval()
        shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        plain = PlainTraining(copy.deepcopy(model, shared))
        packed = PackedTraining(HFModel(model), max(size.adapters))
        difference = losses_apart(plain, packed)
        for name in size.cases:
            rows += measure(name, plain, packed, size)
    return Measured(rows, goals=goals_of(rows, difference))


def batches_of(case: Case, adapters: int) -> list[Batch]:
    """Batches of random tokens, one per adapter."""
    generator = torch.Generator().manual_seed(0)

    def sample() -> torch.Tensor:
        length = int(torch.randint(case.shortest, case.longest + 1, (), generator=generator))
        return torch.randint(5, 8000, (length,), generator=generator)

    return [[sample() for _ in range(case.samples)] for _ in range(adapters)]


class PlainTraining:
    """An adapter of PEFT with its optimizer; several adapters one after the other cost as much as one repeatedly."""

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation({"text_config": "eager"})  # the fastest on a CPU, see docs/decisions/0012
        targets = rf".*language_model\..*\.({'|'.join(SETTINGS.targets)})"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(r=SETTINGS.rank, lora_alpha=int(SETTINGS.alpha), target_modules=targets)
            self.model: Any = get_peft_model(model, config).eval()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, SETTINGS.learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def load(self, values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for layer, pair in values.items():
            for side, value in zip("AB", pair, strict=True):
                own[f"base_model.model.{layer}.lora_{side}.default.weight"].copy_(value)

    def step(self, batch: Batch) -> float:
        ids = pad_sequence(list(batch), batch_first=True)
        mask = pad_sequence([torch.ones_like(one) for one in batch], batch_first=True)
        labels = pad_sequence(list(batch), batch_first=True, padding_value=-100)
        loss = self.model(input_ids=ids, attention_mask=mask, labels=labels, mm_token_type_ids=ids * 0).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class PackedTraining:
    """As many adapters as are trained together at most."""

    def __init__(self, hf_model: HFModel, adapters: int) -> None:
        self.trainer = PackedTrainer(hf_model)
        for place in range(adapters):
            self.trainer.add(str(place), SETTINGS)
        self.pieces: list[float] = []
        """Processor seconds of the pieces of the last step."""

    def step(self, batches: Sequence[Batch]) -> list[float]:
        samples = {str(place): [Sample(one, one) for one in batch] for place, batch in enumerate(batches)}
        step = self.trainer.micro_step(samples)
        self.pieces = []
        complete = False
        while not complete:
            started = time.process_time()
            complete = step.advance()
            self.pieces.append(time.process_time() - started)
        return [self.trainer.adapters[name].update().loss for name in samples]


def losses_apart(plain: PlainTraining, packed: PackedTraining, steps: int = 3) -> float:
    """The largest difference of losses of the first adapter, from equal values and beside others."""
    plain.load(packed.trainer.adapters["0"].values())
    batches = batches_of(CASES["ragged, 4 x 16 to 64 tokens"], 2)
    return max(abs(packed.step(batches)[0] - plain.step(batches[0])) for _ in range(steps))


def measure(name: str, plain: PlainTraining, packed: PackedTraining, size: Size) -> list[dict[str, Any]]:
    batches = batches_of(CASES[name], max(size.adapters))
    tokens = [sum(map(len, batch)) for batch in batches]
    longest: list[float] = []

    def together(adapters: int) -> None:
        packed.step(batches[:adapters])
        if adapters == COMPARED:
            longest.append(max(packed.pieces))

    ways: dict[tuple[str, int], Callable[[], object]] = {
        (PLAIN, COMPARED): lambda: [plain.step(batch) for batch in batches[:COMPARED]]
    }
    for adapters in size.adapters:
        ways["packed", adapters] = functools.partial(together, adapters)
    labels = {f"{way} {adapters}": (way, adapters) for way, adapters in ways}
    seconds = interleaved({label: ways[key] for label, key in labels.items()}, size.rounds, warmup=1)
    per_token = {key: [each / sum(tokens[: key[1]]) for each in seconds[label]] for label, key in labels.items()}
    base = per_token[PLAIN, COMPARED]
    return [
        {
            "case": name,
            "way": way,
            "adapters": adapters,
            "tokens": sum(tokens[:adapters]),
            "CPU ms a token": 1e3 * statistics.median(own),
            "plain over this": statistics.median(theirs / ours for theirs, ours in zip(base, own, strict=True)),
            "longest piece, ms": 1e3 * statistics.median(longest) if (way, adapters) == ("packed", COMPARED) else None,
        }
        for (way, adapters), own in per_token.items()
    ]


def goals_of(rows: Sequence[Mapping[str, Any]], difference: float) -> list[Goal]:
    """The goals of measured rows. difference: see `losses_apart`."""
    goals = [Goal("difference of losses from plain PEFT's in three steps, in millionths", 1e6 * difference, 10, True)]
    for row in rows:
        goal = CASES[row["case"]].goal
        if goal is not None and (row["way"], row["adapters"]) == ("packed", COMPARED):
            what = f"plain PEFT's time over that of {COMPARED} packed adapters, {row['case']} an adapter"
            goals.append(Goal(what, row["plain over this"], goal, False))
    return goals


BENCH = Bench(name="packed", measure=measure_all)
