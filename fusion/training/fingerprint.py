"""What trainings depend on: the base model, fields of the plan, and the data, as hashes. With the same inputs, the same
training has the same result.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion.data.samples import Splits
from fusion.plan.schema import Plan
from fusion.progress import Progress
from heads.storage import FORMAT
from vlora.models.processing import InputProcessor

ALL = ""  # in place of a domain's name


class Inputs(NamedTuple):
    """What the results of a run depend on, as names and values.

    training: of each training that a domain takes part in, by domain; those of every training under `ALL`. validation,
    test: by domain, of its scores and of its results on test data.
    """

    training: Mapping[str, Mapping[str, str]]
    validation: Mapping[str, Mapping[str, str]]
    test: Mapping[str, Mapping[str, str]]

    @property
    def identities(self) -> dict[str, str]:
        """By domain, what identifies it in stored trainings: the hash of its values, so its name may change. Equal
        domains are numbered."""
        found: dict[str, str] = {}
        for name, values in self.training.items():
            if name != ALL:
                digest, count = hash_of_values(values), 0
                while (one := f"#{digest}" + f"-{count}" * bool(count)) in found.values():
                    count += 1
                found[name] = one
        return found

    def of_training(self, domains: Collection[str]) -> dict[str, Mapping[str, str]]:
        """Everything that the result of a training with these domains depends on, removed ones not included."""
        return {name: self.training[name] for name in sorted({ALL, *domains}) if name in self.training}

    def untrained(self, name: str) -> str:
        """Everything that the base model's own score of a domain depends on."""
        shared = {what: value for what, value in self.training[ALL].items() if not what.startswith("training.")}
        return json.dumps([shared, self.training[name], self.test[name]], sort_keys=True)

    def changes(self, stored: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
        """By domain, or `ALL`, the names of values that differ from the last ones under that name. All names for a new
        domain; none for values that an earlier training had, also of a domain with another name."""
        former = {hash_of_values(values) for one in stored for values in one.values()}
        last = {name: values for one in stored for name, values in one.items()}
        return {
            name: [one for one, value in values.items() if last.get(name, {}).get(one) != value]
            for name, values in self.training.items()
            if hash_of_values(values) not in former
        }


def hash_of_values(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def inputs_of(
    plan: Plan, splits: Mapping[str, Splits], base: str, processing: str, device: str, progress: Progress | None = None
) -> Inputs:
    """Fields of the plan, hashes of each domain's data, of the base's weights and of its processing, and the format of
    stored heads, which tells their layers.
    """
    fields = plan.model_dump(mode="json", include={"seed", "quantize", "lora", "training"})
    del fields["training"]["rehearsal"]  # part of the names of those trainings that rehearse
    training: dict[str, Mapping[str, str]] = {}
    validation, test = {}, {}
    for domain in plan.domains:
        name, own = domain.name, splits[domain.name]
        used = domain.model_dump(mode="json", include={"question", "task", "labels", "metric", "head"})
        learned, scored, tested = _hashes_of_data(name, own, progress or Progress())
        training[name] = {"training data": learned, **{field: repr(value) for field, value in used.items()}}
        validation[name] = {"validation data": scored, "confidence": repr(plan.confidence)}
        test[name] = {"test data": tested, "validation data": scored}
    training[ALL] = {
        **dict(_fields(fields)),
        "weights of the base": base,
        "processing of the base": processing,
        "format of heads": str(FORMAT),
        "device": device,
    }
    return Inputs(training, validation, test)


def hash_of_weights(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_of_processing(processor: InputProcessor) -> str:
    """Hash of the settings that turn pictures and questions into tokens, which weights do not determine. The path of
    the checkpoint does not count."""
    settings = {
        "config": {name: value for name, value in processor.config.to_dict().items() if name != "_name_or_path"},
        "image processor": processor.image_processor.to_dict(),
        "chat template": processor.tokenizer.chat_template,
        "vocabulary": processor.tokenizer.get_vocab(),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _hashes_of_data(name: str, splits: Splits, progress: Progress) -> tuple[str, str, str]:
    parts, hashes = (splits.train, splits.validation, splits.test), []
    done = 0
    with progress.work(f"reading the pictures of {name}", sum(map(len, parts)), "samples") as update:
        for part in parts:
            digest = hashlib.sha256(f"{splits.task} {splits.labels} {len(part)}".encode())
            for sample in part:
                digest.update(f"{sample.target} {sample.question} {sample.group}".encode())
                for frame in sample.frames:
                    digest.update(f"{frame.shape}".encode())
                    digest.update(frame.tobytes())
                update(done := done + 1)
            hashes.append(digest.hexdigest())
    return hashes[0], hashes[1], hashes[2]


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield name, repr(value)
        return
    yield from itertools.chain.from_iterable(_fields(v, f"{name}.{key}" if name else str(key)) for key, v in inner)
