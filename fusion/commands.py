"""What `vlora fuse` runs: plan in, adapters and report out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import cv2
import torch
from PIL import Image
from rich.console import Console

from fusion.check import as_json, check, tell
from fusion.data.load import DomainData
from fusion.drawn import render_stream
from fusion.embedded import checkpoint_path
from fusion.objectives import answer_in_words
from fusion.pack import pack
from fusion.plan import DomainPlan, Plan, read_plan_file
from fusion.report import AdapterReport, DomainReport, FusionReport, RollbackReport
from fusion.samples import Splits
from fusion.tasks import METRICS
from fusion.train import Domain, FrozenBase, LoraTrainer
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.types import Request, SamplingParams

_LONGEST_ANSWER = 8  # tokens the base model may take for a label
_TEST_SHOWN = 100  # test samples per domain written out for a live check


def fuse(
    plan_path: Path | str, out: Path | str, *, device: str = "cpu", console: Console | None = None
) -> FusionReport:
    """Run a plan file and write OUT/adapters/NAME/ (PEFT format with heads), OUT/test/ and OUT/report.json. Raises
    BadPlan."""
    checked = check(read_plan_file(plan_path))
    return run(checked.to_train, checked.data, Path(out), device=device, console=console or Console())


def explain(plan_path: Path | str, *, json_out: bool = False, console: Console | None = None) -> None:
    """Tell what a plan file would do, without training. Raises BadPlan with everything that is wrong in it."""
    checked = check(read_plan_file(plan_path))
    console = console or Console()
    if json_out:
        console.out(as_json(checked), highlight=False)
    else:
        tell(checked, console)


def run(plan: Plan, data: Mapping[str, DomainData], out: Path, *, device: str, console: Console) -> FusionReport:
    """See `fuse`. Deterministic for a seed, device and number of threads."""
    started = time.perf_counter()
    base_path = checkpoint_path() if plan.base == "embedded" else plan.base
    splits = {name: own.splits for name, own in data.items()}
    config = EngineConfig(model=base_path, device=device, dtype="float32")
    processor = InputProcessor.from_pretrained(base_path)
    console.print(f"asking the base model {base_path} without adapters")
    before = zero_shot(config, processor, plan, splits)
    base = FrozenBase(load_model(config), processor)
    domains = {domain.name: Domain(domain, splits[domain.name], base) for domain in plan.domains}
    trainer = LoraTrainer(base, domains, plan)
    thresholds = {domain.name: _absolute(domain) for domain in plan.domains}
    packing = pack(tuple(domains), thresholds, trainer, say=console.print)
    reports: list[DomainReport] = []
    adapters: list[AdapterReport] = []
    for packed in packing.adapters:
        name = "-".join(packed.domains)
        adapters.append(AdapterReport(name, packed.domains))
        trainer.save(out / "adapters" / name, packed.state)
        for domain in packed.domains:
            own = domains[domain]
            reports.append(
                DomainReport(
                    name=domain,
                    task=own.splits.task,
                    real_or_synthetic="real" if own.splits.real else "synthetic",
                    metric=own.plan.metric or METRICS[own.splits.task][0],
                    threshold=thresholds[domain],
                    before=before[domain],
                    validation=packed.accuracies[domain],
                    after=trainer.score(domain, own.test),
                    met=domain not in packing.missed,
                    adapter=name,
                    num_test=len(own.test),
                )
            )
    rollbacks = tuple(RollbackReport(r.domain, r.into, dict(r.broken)) for r in packing.rollbacks)
    report = FusionReport(
        plan.base, plan.seed, time.perf_counter() - started, tuple(reports), tuple(adapters), rollbacks
    )
    write_test_data(out / "test", plan, splits)
    report.write(out / "report.json")
    console.print(report.table())
    return report


@torch.no_grad()
def zero_shot(
    config: EngineConfig, processor: InputProcessor, plan: Plan, splits: Mapping[str, Splits]
) -> dict[str, float]:
    """Test accuracy of the base model asked each domain's question in words, its answer compared with the label."""
    engine = LocalEngine(config)
    found = {}
    for domain in plan.domains:
        own = splits[domain.name]
        requests = []
        for number, sample in enumerate(own.test):
            prompt = processor.chat(sample.question or domain.question, own.num_frames)
            encoded = processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
            requests.append(
                Request(
                    request_id=str(number),
                    prompt_ids=encoded.prompt_ids,
                    vision=encoded.vision,
                    sampling=SamplingParams(max_tokens=_LONGEST_ANSWER),
                )
            )
        outputs = engine.run(requests)
        hits = 0
        for number, sample in enumerate(own.test):
            tokens = [token for output in outputs[str(number)] for token in output.token_ids]
            hits += processor.decode(tokens).strip().lower() == answer_in_words(own, sample).lower()
        found[domain.name] = hits / len(own.test)
    return found


def write_test_data(folder: Path, plan: Plan, splits: Mapping[str, Splits]) -> None:
    """Some test samples of every domain as PNG with their labels, and a labelled street video where a domain has clips.

    FOLDER/DOMAIN/labels.json: [{"frames": [file, ...], "question": text, "label": text}, ...].
    FOLDER/DOMAIN/stream.json: {"video": file, "labels": one per second}.
    """
    for domain in plan.domains:
        own = splits[domain.name]
        here = folder / domain.name
        here.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, sample in enumerate(own.test[:_TEST_SHOWN]):
            files = [f"{number:04d}-{place}.png" for place in range(len(sample.frames))]
            for file, frame in zip(files, sample.frames, strict=True):
                cv2.imwrite(str(here / file), cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
            question = sample.question or domain.question
            entries.append({"frames": files, "question": question, "label": answer_in_words(own, sample)})
        (here / "labels.json").write_text(json.dumps(entries, indent=1) + "\n")
        if domain.source == "drawn-actions":
            labels = render_stream(here / "stream.mp4", plan.seed)
            (here / "stream.json").write_text(json.dumps({"video": "stream.mp4", "labels": labels}) + "\n")


def _absolute(domain: DomainPlan) -> float:
    assert isinstance(domain.threshold, float), "relative thresholds are refused before"
    return domain.threshold
