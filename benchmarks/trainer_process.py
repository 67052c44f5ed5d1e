"""A training in a process of its own, for comparison: plain PEFT on another copy of the model.

`python -m benchmarks.trainer_process COUNTER LAYERS` trains until it is ended. COUNTER: a file of eight
bytes, the number of trained tokens.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2VLForConditionalGeneration

from benchmarks.packed import CASES, PlainTraining, batches_of
from vlora.bench.dummy import ranks_config
from vlora.bench.harness import module_command

CLASSES = ("process", "nice process", "idle process")
"""With the engine's priority, with niceness 19, and in the class SCHED_IDLE."""

_COUNT = struct.Struct("q")
_POLL_S = 0.05


class TrainerProcess:
    """The process from outside: paused, until `resume`. It runs on the cores of the thread that starts it."""

    def __init__(self, folder: Path, num_layers: int, kind: str) -> None:
        """Start it, and wait for its first step. kind: one of CLASSES."""
        file = folder / kind
        file.write_bytes(bytes(_COUNT.size))
        command, environment = module_command(__name__, str(file), str(num_layers))
        self._process = subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"})
        self.pid = self._process.pid
        with file.open("r+b") as opened:
            self._counter = mmap.mmap(opened.fileno(), _COUNT.size)
        while not self.num_tokens:
            if self._process.poll() is not None:
                raise RuntimeError(f"the training process ended with {self._process.returncode}; see its output above")
            time.sleep(_POLL_S)
        self.pause()
        # Threads that exist by now keep their own priority; with one thread there is none that computes.
        if kind == CLASSES[1]:
            os.setpriority(os.PRIO_PROCESS, self.pid, 19)
        elif kind == CLASSES[2]:
            os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    @property
    def num_tokens(self) -> int:
        """Trained so far."""
        return int(_COUNT.unpack(self._counter[:])[0])

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def main(file: str, num_layers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(ranks_config(num_layers)).requires_grad_(False).eval()
    training = PlainTraining(model)
    (batch,) = batches_of(CASES["ragged, 4 x 16 to 64 tokens"], 1)
    with open(file, "r+b") as opened:
        counter = mmap.mmap(opened.fileno(), _COUNT.size)
    num_tokens = 0
    while True:
        training.step(batch)
        num_tokens += sum(map(len, batch))
        counter[:] = _COUNT.pack(num_tokens)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
