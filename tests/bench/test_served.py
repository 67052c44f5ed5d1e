"""The server of a bench ends with the bench."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vlora.bench.serving.server_process import launched_server


def test_terminating_a_bench_ends_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server here is a script that prints its ready line and sleeps."""
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\necho 'ready: rpyc localhost:1 | http localhost:2 | model'\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, launched_server("vlora.cli", "serve") as server:
        assert (server.rpyc_port, server.http_port) == (1, 2) and server.front_end.is_running()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert left.value.code == 128 + signal.SIGTERM
    assert not server.front_end.is_running() and signal.getsignal(signal.SIGTERM) is before
