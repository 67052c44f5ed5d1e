"""Plain transformers and PEFT on the same requests, in this process."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from vlora.bench.dummy import random_peft
from vlora.bench.serve.load import LoadRun, ObservedAnswer, WorkloadRequest
from vlora.models.pretrained import from_pretrained
from vlora.models.processing import InputProcessor, to_tensor
from vlora.models.vision.images import open_image
from vlora.types import TensorValue


class GreedyAnswer(NamedTuple):
    token_ids: list[int]
    margins: list[float]  # of each token's logit over the second best, in standard deviations of that step's logits


class PreparedRequest(NamedTuple):
    """A request as token ids and processed pictures: the input of a baseline's timed part."""

    prompt_ids: tuple[int, ...]
    fields: tuple[Mapping[str, TensorValue], ...]
    adapter: int | None
    answer_tokens: int


def prepare(processor: InputProcessor, request: WorkloadRequest) -> PreparedRequest:
    pictures = [open_image(io.BytesIO(each)) for each in request.pictures]
    encoded = processor.encode(processor.chat(request.text, len(pictures)), pictures)
    return PreparedRequest(
        encoded.prompt_ids, tuple(item.fields for item in encoded.vision), request.adapter, request.answer_tokens
    )


class Baseline:
    """A model with transformers' own attention (sdpa) and generation, and PEFT's model with adapters on it, or None."""

    def __init__(self, plain: Any, peft: Any, names: Sequence[str]) -> None:
        self._plain, self._peft, self._names = plain, peft, names

    @classmethod
    def load(cls, folder: str, adapters: Sequence[str], dtype: str) -> Baseline:
        """Load a model and the adapters in these folders, in a type such as float32."""
        plain = from_pretrained(AutoModelForImageTextToText, folder, dtype=getattr(torch, dtype)).eval()
        # The same weights without PEFT's layers, which cost time even when they are disabled.
        shared = {id(parameter): parameter for parameter in plain.parameters()}
        adapted = copy.deepcopy(plain, memo=shared)
        names = [f"a{index}" for index in range(len(adapters))]
        peft: Any = None
        for name, path in zip(names, adapters, strict=True):
            if peft is None:
                peft = PeftModel.from_pretrained(adapted, path, adapter_name=name)
            else:
                peft.load_adapter(path, adapter_name=name)
        if peft is not None:
            peft.to(plain.dtype).eval()
        return cls(plain, peft, names)

    @classmethod
    def random(cls, plain: Any, num_adapters: int, rank: int) -> Baseline:
        """The model, which gets PEFT's layers, with random adapters on all linear layers of its language model."""
        return cls(plain, random_peft(plain, rank, num_adapters), [f"a{index}" for index in range(num_adapters)])

    def run(self, requests: Sequence[PreparedRequest], batch: int) -> LoadRun:
        """Answer requests in batches of at most `batch`, adapters mixed within a batch (`adapter_names`)."""
        answers: list[ObservedAnswer] = []
        started_s = time.perf_counter()
        for start in range(0, len(requests), batch):
            part = requests[start : start + batch]
            batch_answers = [ObservedAnswer(time.perf_counter(), prompt_tokens=len(each.prompt_ids)) for each in part]
            answers += batch_answers
            generated = self.generate(part)
            if self._plain.device.type == "cuda":
                torch.cuda.synchronize()
            for each, token_ids in zip(batch_answers, generated.sequences, strict=True):
                each.answer_tokens = len(token_ids)
                each.end_s = time.perf_counter()
        return LoadRun(answers, started_s, time.perf_counter())

    def greedy(self, request: PreparedRequest) -> GreedyAnswer:
        found = self.generate([request], logits=True)
        logits = torch.stack([step[0] for step in found.logits]).float()
        best = logits.topk(2).values
        margins = (best[:, 0] - best[:, 1]) / logits.std(-1)
        return GreedyAnswer(found.sequences[0].tolist(), margins.tolist())

    @torch.no_grad()
    def generate(self, requests: Sequence[PreparedRequest], *, logits: bool = False) -> Any:
        """The output of transformers, with sequences without the prompts."""
        arguments = _inputs(requests, self._plain.config, self._plain.dtype)
        arguments = {name: tensor.to(self._plain.device) for name, tensor in arguments.items()}
        length = arguments["input_ids"].shape[1]
        model = self._plain
        if any(each.adapter is not None for each in requests):
            model = self._peft
            arguments["adapter_names"] = [
                "__base__" if each.adapter is None else self._names[each.adapter] for each in requests
            ]
        found = model.generate(
            **arguments,
            max_new_tokens=max(each.answer_tokens for each in requests),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=logits,
        )
        found.sequences = found.sequences[:, length:]
        return found


def _inputs(requests: Sequence[PreparedRequest], config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The input of transformers for a batch: prompts padded on the left."""
    longest = max(len(each.prompt_ids) for each in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(requests):
        ids[row, longest - len(each.prompt_ids) :] = torch.tensor(each.prompt_ids)
        mask[row, longest - len(each.prompt_ids) :] = 1
    found: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    for name in ("pixel_values", "image_grid_thw"):
        parts = list(_parts(requests, name))
        if parts:
            found[name] = torch.cat(parts)
    if "pixel_values" in found:
        found["pixel_values"] = found["pixel_values"].to(dtype)
    return found


def _parts(requests: Sequence[PreparedRequest], name: str) -> Iterator[torch.Tensor]:
    for each in requests:
        for fields in each.fields:
            yield to_tensor(fields[name])
