"""Commands of guides as forks of one process that has imported their modules: dozens of commands, and importing takes
most of a second each time.

`python -m tests.docs.forking SOCKET` is that process; the programs `vlora` and `python` of `commands` ask it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.core_size import ROOT
from tests.processes import until

_SCRIPTED = "tests.server.scripted_vlora"
_MODULES = ("openai", "uvicorn", "cv2", "apps.video_analytics", "tests.server.scripted", "vlora.server.http.server")
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({address!r})
call = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(asked, [call], [0, 1, 2])
pid = int(asked.recv(32))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
sys.exit(int(asked.recv(32) or 1))
"""


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """A folder with the programs `vlora` (scripted) and `python` (of a program on stdin), for the PATH."""
    address = str(folder / "forking")
    (programs := folder / "programs").mkdir()
    for name in ("vlora", "python"):
        (programs / name).write_text(_PROGRAM.format(python=sys.executable, address=address, name=name))
        (programs / name).chmod(0o755)
    command = [sys.executable, "-m", "tests.docs.forking", address]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or Path(address).exists())
        assert process.poll() is None
        yield programs
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _forked(listener: socket.socket) -> str:
    """The name of the program that is called; returns in a fork with the caller's arguments, files and environment."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a program are not waited for
    while True:
        asked, _ = listener.accept()
        if os.fork():
            asked.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        call, files, _, _ = socket.recv_fds(asked, 2**20, 3)
        name, arguments, folder, environment = json.loads(call)
        if pid := os.fork():
            asked.send(str(pid).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            asked.send(str(code if code >= 0 else 128 - code).encode())
            os._exit(0)
        asked.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = [name, *arguments]
        return str(name)


def _main(address: str) -> None:
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()  # a fork that ends collects its own objects only
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    if _forked(listener) == "vlora":
        runpy.run_module(_SCRIPTED, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main(sys.argv[1])
