"""The extent of a run, its model, its processes (executors and clients) with their processor time and memory, and the
form of a row.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import Qwen2VLForConditionalGeneration

from vlora.bench.dummy import ranks_config
from vlora.bench.harness import module_command

TRAIN = {"do": "train", "steps": 1, "rows": 2, "length": 64}
"""Training steps of 128 tokens."""


class Mix(NamedTuple):
    """Extent of the measurement of decoding beside training."""

    layers: int  # of the model
    inference: int  # clients without training. training: of them are replaced by trainings
    training: int
    prompt: int  # tokens of a prompt, and of a row of a training step
    answer: int  # tokens of an answer
    requests: int  # of each inference client in a window
    rounds: int  # windows of each way


class Size(NamedTuple):
    """Extent of a run. clients: numbers of clients of the memory's measurement. rows: of table 5's clients."""

    layers: int
    clients: tuple[int, ...]
    rounds: int
    tokens: int
    rows: tuple[int, ...]
    mix: Mix


FULL = Size(
    layers=8,
    clients=(1, 4, 8),
    rounds=5,
    tokens=16,
    rows=(1, 1, 2, 4, 8, 16, 32, 64),
    mix=Mix(layers=4, inference=8, training=2, prompt=64, answer=64, requests=2, rounds=2),
)
QUICK = Size(
    layers=5,
    clients=(1, 2),
    rounds=5,
    tokens=16,
    rows=(1, 2, 16, 48),
    mix=Mix(layers=2, inference=4, training=1, prompt=64, answer=32, requests=2, rounds=1),
)


def write_checkpoint(folder: Path, num_layers: int) -> Path:
    """A model of layers with 15 million parameters each, in float32."""
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(ranks_config(num_layers)).save_pretrained(folder / "model")
    return folder / "model"


def row(what: str, way: str, **values: Any) -> dict[str, Any]:
    names = ("clients", "executor MiB", "clients MiB", "all MiB", "ratio", "tokens a second")
    more = ("latency ms", "first token ms", "calls a product", "prefill", "generation", "training", "executor busy")
    return {"what": what, "way": way} | dict.fromkeys((*names, *more, "curves")) | values


# One thread, and freed memory of tensors returns to the system.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


class Process:
    """A process of this bench. Its first line of output means that it is ready. printed: what it printed last."""

    printed = ""

    def __init__(self, module: str, *arguments: str) -> None:
        command, environment = module_command(f"benchmarks.split.{module}", *arguments)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | _ENVIRONMENT
        )

    def read(self) -> str:
        """The next line. Raises RuntimeError when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the bench ended with exit code {self._process.wait()}")
        return line

    def answer(self) -> Any:
        """The answer to a message, a line."""
        return json.loads(self.read())

    def send(self, message: Any) -> None:
        """Send a client a command; it answers with one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        self._process.terminate()
        self.printed, _ = self._process.communicate()

    def cpu_s(self) -> float:
        """Processor time so far, of all threads, in the kernel's nanoseconds."""
        total = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def pss_mib(self) -> float:
        """Memory of the process; a page that n processes share counts 1 / n."""
        return float(psutil.Process(self._process.pid).memory_full_info().pss) / 2**20

    def private_mib(self, *, shared: bool) -> float:
        """Memory that maps no file, with or without memory that is shared with other processes."""
        names = ("RssAnon:", "RssShmem:") if shared else ("RssAnon:",)
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(names)) / 1024


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[Sequence[Process]]:
    """Wait until all are ready, and end them after the block."""
    try:
        for process in processes:
            process.read()
        yield processes
    finally:
        for process in processes:
            process.stop()


def run_together(clients: Sequence[Process], commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let every client carry out its command at the same time. Returns their answers."""
    for client, command in zip(clients, commands, strict=True):
        client.send(command)
    return [client.answer() for client in clients]
