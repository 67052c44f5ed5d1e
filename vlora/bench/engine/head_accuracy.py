"""Accuracy of one adapter through its head, and as generated text, on the same test samples by the same engine.

Adapters are trained as in `vlora fuse`, with the text loss next to the head's loss, so both outputs are trained.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, Plan, TrainingPlan
from fusion.synthetic.sources import load_source
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.objectives import answer_in_words
from fusion.training.trainer import LoraTrainer
from heads import expected_calibration_error, load_heads
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.types import HeadAnswer, Request, SamplingParams

_DOMAINS = {
    "drawn-signs": "what sign is shown ?",
    "drawn-actions": "what happens in the video ?",
}
_LONGEST_ANSWER = 8  # tokens


def compare(quick: bool) -> list[dict[str, Any]]:
    """Accuracy of heads and of generated text on the embedded model's domains.

    Args:
        quick: The first domain only, trained for a third of the steps.

    Returns:
        A row per domain: test accuracy of the head and of generated text, the head's calibration error with and without
        its calibration, and the number of text tokens.
    """
    training = TrainingPlan(steps=40 if quick else 120)
    domains = tuple(
        DomainPlan(name=source, source=source, question=question, threshold=0.5)
        for source, question in list(_DOMAINS.items())[: 1 if quick else None]
    )
    plan = Plan(training=training, domains=domains)
    config = EngineConfig(model=checkpoint_path(), dtype="float32")
    processor = InputProcessor.from_pretrained(checkpoint_path())
    base = FrozenBase(load_model(config), processor)
    trainer = LoraTrainer(
        base, {own.name: Domain(own, load_source(own.name, plan.seed), base) for own in domains}, plan
    )
    found = []
    for name, domain in trainer.domains.items():
        trainer.adapter.reset()
        trainer.train(name, ())
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(Path(folder) / name, trainer.adapter.snapshot())
            found.append(_measure_accuracy(config, processor, domain, Path(folder) / name))
    return found


def _measure_accuracy(config: EngineConfig, processor: InputProcessor, domain: Domain, adapter: Path) -> dict[str, Any]:
    engine = LocalEngine(config)
    name = domain.plan.name
    engine.engine.load_adapter(name, str(adapter))
    samples = domain.splits.test
    requests = []
    for number, sample in enumerate(samples):
        prompt = processor.chat(domain.plan.question, len(sample.frames))
        encoded = processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
        requests += [
            Request(
                request_id=f"{number} {head}",
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter=name,
                head=head,
                sampling=SamplingParams(max_tokens=_LONGEST_ANSWER),
            )
            for head in (name, None)
        ]
    outputs = engine.run(requests)
    answers: list[HeadAnswer] = []
    num_right_texts, lengths = 0, 0
    for number, sample in enumerate(samples):
        answer = outputs[f"{number} {name}"][-1].head
        assert answer is not None
        answers.append(answer)
        tokens = [token for output in outputs[f"{number} None"] for token in output.token_ids]
        num_right_texts += processor.decode(tokens).strip() == answer_in_words(domain.splits, sample)
        lengths += len(tokens)
    right = [answer.label_id == sample.target for answer, sample in zip(answers, samples, strict=True)]
    temperature = load_heads(adapter)[name].task.parameters["temperature"]
    return {
        "domain": name,
        "test samples": len(samples),
        "head": sum(right) / len(samples),
        "words": num_right_texts / len(samples),
        "tokens in words": lengths / len(samples),
        "temperature": temperature,
        "calibration error": expected_calibration_error([answer.confidence for answer in answers], right),
        "calibration error before": expected_calibration_error(
            [_uncalibrated(answer, temperature) for answer in answers], right
        ),
    }


def _uncalibrated(answer: HeadAnswer, temperature: float) -> float:
    """The head's confidence at temperature 1: its probabilities to the power of the temperature, normalised to a sum
    of 1.
    """
    assert answer.label_id is not None
    powers = [score**temperature for score in answer.scores]
    return powers[answer.label_id] / sum(powers)
