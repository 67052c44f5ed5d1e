"""A client process that trains or decodes on command: `python -m benchmarks.split.worker FOLDER ...`.

Reads commands from standard input, one JSON object a line, and answers each with one, which has an event for each
prefill, decoded token and half of a training step. Without --base it has its own copy of the model; with several, a
model for each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from vlora.models.pretrained import from_pretrained
from vlora.split import connect

LORA_TARGETS = r".*language_model\..*\.(q|k|v|o)_proj"
LORA_RANK = 8
"""The adapter LoRA 3 of the paper's table 2."""


class Client:
    """A model with an adapter, its optimizer, and a sequence that is being decoded.

    Attributes:
        events: Kind, begin, end and number of tokens of each part of the present command.
    """

    def __init__(self, folder: str, dtype: str, base: str | None, seed: int) -> None:
        """base: address of an executor; None for an own copy of the weights, mapped if they have the file's type."""
        model = from_pretrained(AutoModelForImageTextToText, folder, dtype=getattr(torch, dtype)).eval()
        model.requires_grad_(False)
        if base is not None:
            model = connect(base).wrap(model)
        torch.manual_seed(seed)
        self._vocabulary = model.config.text_config.vocab_size - 16
        self._model: Any = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS))
        self._optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], 1e-4)
        self._generator = torch.Generator().manual_seed(seed)
        self._out: Any = None
        self.events: list[tuple[str, float, float, float]] = []

    def train(self, steps: int, rows: int, length: int) -> None:
        for _ in range(steps):
            started = time.monotonic()
            ids = torch.randint(8, self._vocabulary, (rows, length), generator=self._generator)
            loss = self._forward(ids, labels=ids).loss
            between = time.monotonic()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            # Forward and backward cost the executor the same, so each counts as half of the tokens.
            half = rows * length / 2
            self.events += [("train", started, between, half), ("train", between, time.monotonic(), half)]

    @torch.no_grad()
    def prefill(self, rows: int, length: int) -> None:
        started = time.monotonic()
        ids = torch.randint(8, self._vocabulary, (rows, length), generator=self._generator)
        self._out = self._forward(ids, use_cache=True)
        self.events.append(("prefill", started, time.monotonic(), rows * length))

    @torch.no_grad()
    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            started = time.monotonic()
            ids = self._out.logits[:, -1].argmax(-1, keepdim=True)
            rows, cache = len(ids), self._out.past_key_values
            places = torch.full((3, rows, 1), cache.get_seq_length())
            self._out = self._forward(ids, past_key_values=cache, use_cache=True, position_ids=places)
            self.events.append(("decode", started, time.monotonic(), rows))

    def infer(self, begin: float, requests: int, rows: int, length: int, tokens: int) -> None:
        """Requests one after the other. begin: on the monotonic clock, which is that of all processes."""
        time.sleep(max(0.0, begin - time.monotonic()))
        for _ in range(requests):
            self.prefill(rows, length)
            self.decode(tokens)

    def finetune(self, begin: float, until: str, rows: int, length: int) -> None:
        """Training steps one after the other, until a file exists, or the process that began this one has ended."""
        parent = os.getppid()
        time.sleep(max(0.0, begin - time.monotonic()))
        while not os.path.exists(until) and os.getppid() == parent:
            self.train(1, rows, length)

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> Any:
        return self._model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids, dtype=torch.int), **arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--base", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    args = parser.parse_args()
    os.nice(args.nice)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    clients = [Client(args.folder, args.dtype, base, args.seed) for base in args.base or (None,)]
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        client, name = clients[command.pop("client", 0)], command.pop("do")
        started = time.perf_counter()
        client.events = []
        getattr(client, name)(**command)
        answer = {"wall_s": time.perf_counter() - started, "events": client.events}
        print(json.dumps(answer | {"tokens": sum(tokens for *_, tokens in client.events)}), flush=True)


if __name__ == "__main__":
    main()
