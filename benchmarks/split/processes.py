"""Handles of the bench's processes: executors and clients, with their processor time and memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from vlora.bench.harness import module_command

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
