"""Figures from the rows of `vlora bench tp`, from a base executor and its clients, from trainings on the
embedded model, from heads, and from configurations.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.adapters import base_of, block_diagonal_score, cut, plan_of, trainer_of
from benchmarks.fusion import packing
from benchmarks.paper import simulations, steps
from benchmarks.paper.figure import QUICK_MODEL, Measuring
from benchmarks.rivals import RIVALS, answers
from benchmarks.split import mixed, split
from benchmarks.split.processes import FULL, QUICK
from fusion.data.samples import Splits
from fusion.embedded import checkpoint_path
from fusion.plan.schema import LoraPlan
from fusion.synthetic.drawn import ACTIONS
from fusion.synthetic.sources import load_source
from fusion.teachers.built_in import TEACHERS
from fusion.training.objectives import objective_of
from fusion.training.scoring import score_before_training
from fusion.training.trainer import LoraTrainer
from vlora.bench import tp
from vlora.bench.dummy import MODELS, Vision, dummy_picture, half_billion_config, unseen
from vlora.bench.harness import measured
from vlora.bench.report import Row
from vlora.bench.timed_engine import HEAD, TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio, threads
from vlora.models.loading import dummy_model
from vlora.models.processing import InputProcessor


def models(_: Measuring) -> list[Row]:
    """Sizes of the models that the benchmarks measure, from their configurations."""
    rows = []
    for model in (QUICK_MODEL, *MODELS.values()):
        built: Any = dummy_model(model.config(), "bfloat16", torch.device("meta"), seed=0)
        text = built.config.text_config
        vision = [p.numel() for name, p in built.named_parameters() if "visual" in name or "vision" in name]
        rows.append(
            {
                "model": model.name,
                "GB": f"{sum(p.nbytes for p in built.parameters()) / 2**30:.1f}",
                "layers": text.num_hidden_layers,
                "dimension": text.hidden_size,
                "vision": f"{sum(vision) / 1e9:.2f}",
            }
        )
    return rows


def slots(measuring: Measuring, cases: Sequence[Mapping[str, Any]], rounds: int) -> list[Row]:
    """Two inference slots, merged and unmerged, and the switch between them in two ways."""
    ms = {row["mode"]: row["ms"] for row in steps.compare(measuring, cases, rounds)}
    between = {"merged ms": ms["merged"], "unmerged ms": ms["unmerged"]}
    return [{**row, **between} for row in simulations.switching(measuring)]


# -- ranks ------------------------------------------------------------------------------------------------------------

_KINDS = {"replicated": "replicated (NFS-LoRA)", "slora": "split (S-LoRA)", "bd": "block-diagonal (BD-LoRA)"}


def ranks(measuring: Measuring, answer: int) -> list[Row]:
    """Tokens per second of two ranks, or of all GPUs, of `vlora bench tp`: of a decode step, and of each request with
    an answer of `answer` tokens and a prefill of each request, one after the other, as BD-LoRA's figure 10.
    """
    on_gpus = torch.cuda.device_count() > 1
    timed = measured(tp.BENCH, measuring.setting.quick, latencies_us=() if on_gpus else (0, 200)).rows
    rows: list[Row] = []
    prefills = {(row["latency us"], row["rank"]): row for row in timed if row["phase"] == "prefill"}
    for row in timed:
        if row["phase"] != "decode":
            continue
        batch, delay = row["batch"], row["latency us"]
        prefill = prefills[delay, row["rank"]]
        for kind, name in {"base": "base model", **_KINDS}.items():
            step_ms, prefill_ms = (
                each["base ms"] * (1.0 if kind == "base" else each[f"{kind} / base"]) for each in (row, prefill)
            )
            request_s = (batch * prefill_ms + answer * step_ms) / 1e3
            rows.append(
                {
                    "batch": batch,
                    "delay us": delay,
                    "network": f"+{delay} µs a collective" if delay else "no delay added",
                    "rank": row["rank"],
                    "adapter": name,
                    "step tokens/s": 1e3 * batch / step_ms,
                    "request s": request_s,
                    "tokens/s": answer / request_s,
                }
            )
    return rows


def trade_off(measuring: Measuring, rows: Sequence[Row]) -> list[Row]:
    """Those of `ranks` of single requests without an added delay, and mean test accuracy of LoRA and of two blocks."""
    with threads(1):
        found = measuring.once(
            "block-diagonal-scores", lambda: [block_diagonal_score(n, measuring.setting.quick) for n in (1, 2)]
        )
    accuracy = dict(zip((_KINDS["slora"], _KINDS["bd"]), found[:2], strict=True))
    return [
        {**row, "accuracy": 100 * accuracy[row["adapter"]]}
        for row in rows
        if row["adapter"] in accuracy and row["batch"] == 1 and not row["delay us"]
    ]


# -- an executor and its clients ---------------------------------------------------------------------------------------


def executor(measuring: Measuring, part: str) -> dict[str, Any]:
    """A part of `benchmarks.split`, with its goals."""
    rows = split.one(part, QUICK if measuring.setting.quick else FULL)
    return {"rows": executor_rows(rows), "goals": [list(goal) for goal in split.goals_of(rows)]}


def executor_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the curves by kind, and the trainings that fit in the memory of the most copies in bfloat16, which
    cannot share it; none with fewer copies, because the executor's own process takes more than it saves.
    """
    copies = FULL.clients[-1]
    found = []
    for row in rows:
        if row["curves"]:
            curves = {f"{kind} curve": values for kind, values in zip(mixed.KINDS, row["curves"], strict=True)}
            seconds = [mixed.BIN_S * (place + 0.5) for place in range(len(row["curves"][0]))]
            row = {**row, **curves, "seconds": seconds, "inference": row["tokens a second"] - row["training"]}
        found.append(row)
    memory = [row for row in rows if row["what"] == "memory" and "bfloat16" in row["way"] and row["clients"] == copies]
    if memory:
        (own,) = (row for row in memory if not row["executor MiB"])
        (through,) = (row for row in memory if row["executor MiB"])
        fitting = math.floor((own["all MiB"] - through["executor MiB"]) / (through["clients MiB"] / copies))
        found.append({"what": "fitting", "ratio": max(0, fitting) / copies})
    return found


# -- accuracy on the embedded model -----------------------------------------------------------------------------------


def _trainer(questions: Mapping[str, str], steps: int, batch: int, quick: bool) -> LoraTrainer:
    own = {source: (source, question) for source, question in questions.items()}
    plan = plan_of(own, 0, steps, batch, lora=LoraPlan(rank=8, alpha=16))
    return trainer_of(plan, base_of(), {source: _splits(source, quick) for source in own})


def _splits(source: str, quick: bool) -> Splits:
    """A source's samples; quick: the first of each part."""
    splits = load_source(source, 0)
    return cut(splits, 300, 100, 120) if quick else splits


def adapters(measuring: Measuring, tasks: Mapping[str, tuple[str, str]], steps: int, batch: int) -> list[Row]:
    """Test scores of the model before training and with an adapter. tasks: source and question."""
    trainer = _trainer(dict(tasks.values()), steps, batch, measuring.setting.quick)
    before = {name: score_before_training(domain) for name, domain in trainer.domains.items()}
    rows = []
    for task, (source, _) in tasks.items():
        trainer.adapter.reset()
        trainer.train(source, ())
        score = trainer.evaluator.score(source, trainer.domains[source].test)
        rows.append({"task": task, "source": source, "before": 100 * before[source], "adapter": 100 * score})
    return rows


def small_models(measuring: Measuring, rows: Sequence[Row], rival_steps: int | None = None) -> list[Row]:
    """Those of `adapters`, with the score of a small model where there is one."""
    return [
        {**row, "small model": _small_model_score(row["source"], measuring.setting.quick, rival_steps)} for row in rows
    ]


def _small_model_score(source: str, quick: bool, rival_steps: int | None) -> float | None:
    """Of the source's rival, otherwise of its built-in teacher; None if it has neither."""
    splits = _splits(source, quick)
    if source in RIVALS:
        found = answers(RIVALS[source].train(splits, seed=0, steps=rival_steps), splits.test)
    elif source in TEACHERS:
        found = list(TEACHERS[source](splits).answers(splits.test))
    else:
        return None
    return 100 * float(objective_of(splits).metric(found, [sample.target for sample in splits.test]))


def capacity(
    measuring: Measuring, ranks: Sequence[int], counts: Sequence[int], steps: int, seeds: int
) -> dict[str, Any]:
    """Test scores of the domains of real pixels by rank and number of domains that are trained jointly into an adapter,
    and what `vlora fuse` makes of them at the lowest rank.

    At each number every domain is in one adapter, so that means are over the same domains. `error`: half the 95 %
    interval of a mean over test samples and seeds. Thresholds are the validation scores alone, minus ten points.
    """
    rows: list[Row] = []
    found: dict[tuple[int, int, str], list[float]] = {}  # by rank, number and domain
    fusion: list[Row] = []
    for rank, seed in itertools.product(ranks, range(seeds)):
        folder = measuring.store.folder / f"real-{rank}-{seed}"
        training = packing.Training(seed, rank, steps, folder, quick=measuring.setting.quick)
        names = [name for name in training.domains if not training.trainer.adapter.is_independent(name)]
        for count in counts:
            sets = [names[first : first + count] for first in range(0, len(names), count)]
            for own in sets:
                training.rehearsing.together(tuple(sorted(own)))
            for name, score in training.tested_together(sets).items():
                found.setdefault((rank, min(count, len(names)), name), []).append(score)
        if rank == ranks[0]:
            fusion.append(packing.fused(training, seed))
    tasks = {name: domain.splits.task for name, domain in training.domains.items()}
    for rank, count in dict.fromkeys(key[:2] for key in found):
        for task in ("all tasks", *dict.fromkeys(tasks[name] for name in names)):
            own = [name for name in names if task in ("all tasks", tasks[name])]
            scores = {name: statistics.fmean(found[rank, count, name]) for name in own}
            samples = {name: seeds * len(training.domains[name].test) for name in own}
            variance = sum(scores[name] * (1 - scores[name]) / samples[name] for name in own)
            about = {"rank": rank, "task": task, "domains": count, "scores": scores}
            error = 196 * math.sqrt(variance) / len(own)
            rows.append({**about, "score": 100 * statistics.fmean(scores.values()), "error": error})
    return {"rows": [*_kept(rows), *fusion], "goals": []}


def _kept(rows: Sequence[Row]) -> list[Row]:
    """The rows, with their share of the scores of adapters for one domain."""
    alone = {(row["rank"], row["task"]): row["score"] for row in rows if row["domains"] == 1}
    return [{**row, "kept": 100 * row["score"] / max(1.0, alone[row["rank"], row["task"]])} for row in rows]


_SIDE = 16  # patches per side of a frame; four patches make a token
_QUESTION = 16  # tokens
_PAPER_ANSWER = 5  # tokens; figure 11's head saves 4 rounds
_ADAPTER = "actions"

Ask = Callable[[int, int, int], None]
"""Runs a number of concurrent requests of so many frames to completion; 0 answer tokens query the head."""


def latency(measuring: Measuring, limit_s: float) -> list[Row]:
    """Milliseconds of a head and of text, by tower, batch, frames and length of the text.

    Shapes larger than one whose round takes more than `limit_s` are left out. `answer`: the shorter or the longer one.
    """
    quick = measuring.setting.quick
    small, large = ([(1, 1), (8, 1)], [(1, 1)]) if quick else (itertools.product((1, 8), (1, 4, 6)), [(1, 1), (8, 1)])
    rows: list[Row] = []
    towers: dict[str, tuple[Vision, Any]] = {"ViT-B": ("tower", small), "Qwen2-VL": ("qwen2-vl", large)}
    for tower, (vision, shapes) in towers.items():
        ask = asking(half_billion_config(8 if quick else 24, vision))
        rows += measure_tower(tower, ask, shapes, 1 if quick else 5, limit_s)
    longest = max(row["answer tokens"] for row in rows)
    return [{**row, "answer": "longer" if row["answer tokens"] == longest else "shorter"} for row in rows]


def measure_tower(tower: str, ask: Ask, shapes: Iterable[tuple[int, int]], rounds: int, limit_s: float) -> list[Row]:
    answers = (median_answer_tokens(), _PAPER_ANSWER)
    rows: list[Row] = []
    for place, (batch, frames) in enumerate(shapes):
        calls = {str(tokens): functools.partial(ask, batch, frames, tokens) for tokens in (0, *answers)}
        # The first shape is the smallest: the others need no warm-up, which would take as long as a round.
        seconds = interleaved(calls, rounds, warmup=int(place == 0), limit_s=limit_s)
        for tokens in answers:
            head, words = seconds["0"], seconds[str(tokens)]
            ratio = median_ratio(head, words)
            about = {"tower": tower, "batch": batch, "frames": frames, "answer tokens": tokens}
            times = {"head ms": median_ms(head), "words ms": median_ms(words)}
            rows.append({**about, **times, "ratio": ratio, "less %": 100 * (1 - ratio), "rounds": len(words)})
        if sum(map(statistics.median, seconds.values())) > limit_s:
            break
    return rows


def median_answer_tokens() -> int:
    """Median over the built-in domain of actions: the tokens of its labels in the embedded model, with the end token;
    of two middle values the shorter, which favours text.
    """
    tokenizer = InputProcessor.from_pretrained(checkpoint_path()).tokenizer
    ids = tokenizer(list(ACTIONS), add_special_tokens=False)["input_ids"]
    return statistics.median_low(len(own) + 1 for own in ids)


def asking(model_config: Any) -> Ask:
    """Questions to one engine, each about frames that no cache has seen."""
    model = dummy_model(model_config, "bfloat16", torch.device("cpu"), seed=0)
    settings: dict[str, Any] = {"max_batch_size": 8, "max_step_tokens": 4096, "arena_bytes": 2 * 2**30}
    engine = TimedEngine(model, {_ADAPTER: 16}, heads=True, **settings)
    picture = dummy_picture(model_config, _SIDE)

    def ask(batch: int, frames: int, answer_tokens: int) -> None:
        for _ in range(batch):
            shown, head = [unseen(picture) for _ in range(frames)], None if answer_tokens else HEAD
            engine.add(_QUESTION, max(1, answer_tokens), _ADAPTER, shown, head=head)
        engine.finish()

    return ask
