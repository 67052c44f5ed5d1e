"""A run's identity as hashes: the base model, the plan and the data. Runs with the same identity train identically."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fusion.data.samples import Splits
from fusion.plan.schema import Plan
from fusion.progress.progress import Progress
from heads.storage import FORMAT
from vlora.models import InputProcessor


def identity_of(
    plan: Plan,
    splits: Mapping[str, Splits],
    base: str,
    processing: str,
    device: str,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Fields of the plan by dotted name, hashes of each domain's data, the base's weights and its processing, and the
    format of stored heads, which tells their layers.

    Args:
        progress: display for reading all pictures.
    """
    fields = {f"plan's {name}": value for name, value in _fields(plan.model_dump(mode="json"))}
    data = {f"data of {name}": _hash_of_data(name, own, progress or Progress()) for name, own in splits.items()}
    return {
        **fields,
        **data,
        "weights of the base": base,
        "processing of the base": processing,
        "format of heads": str(FORMAT),
        "device": device,
    }


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


def _hash_of_data(name: str, splits: Splits, progress: Progress) -> str:
    digest = hashlib.sha256(f"{splits.task} {splits.labels}".encode())
    parts = (splits.train, splits.validation, splits.test)
    done = 0
    with progress.work(f"reading the pictures of {name}", sum(map(len, parts)), "samples") as update:
        for part in parts:
            digest.update(f"part of {len(part)}".encode())
            for sample in part:
                digest.update(f"{sample.target} {sample.question} {sample.group}".encode())
                for frame in sample.frames:
                    digest.update(f"{frame.shape}".encode())
                    digest.update(frame.tobytes())
                update(done := done + 1)
    return digest.hexdigest()


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield name, repr(value)
        return
    yield from itertools.chain.from_iterable(_fields(v, f"{name}.{key}" if name else str(key)) for key, v in inner)
