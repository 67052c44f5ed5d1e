"""Connections between clients and a base executor: sockets and shared memory.

On one machine a Unix socket carries the heads, and tensors are in memory that both processes map. Elsewhere everything
travels over TCP, with TLS where the executor has a certificate.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import ssl
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vlora.errors import BadConfig
from vlora.wire.address import Address
from vlora.wire.heartbeat import keep_alive

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


def listen(address: Address) -> socket.socket:
    """A listening socket. A Unix socket is accessible to its user only. Raises BadConfig."""
    try:
        if not address.path:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((address.host, address.port), family=family)
        with _folder_locked(address.path):
            if not _remove_stale(address.path):
                raise BadConfig(f"cannot listen on {address}: another process listens there; choose another path")
            sock = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)
            try:
                sock.bind(address.path)
            finally:
                os.umask(before)
            sock.listen()
        return sock
    except OSError as error:
        raise BadConfig(f"cannot listen on {address}: {error.strerror or error}; choose another address") from error


def close_listener(sock: socket.socket) -> None:
    """Close a listening socket and remove its file, if it has one that is not a successor's."""
    name = sock.getsockname()
    sock.close()
    if isinstance(name, str):
        with contextlib.suppress(OSError), _folder_locked(name):
            _remove_stale(name)


@contextlib.contextmanager
def _folder_locked(path: str) -> Iterator[None]:
    """Let one process at a time replace or remove sockets of a folder: two may find the same one stale."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_stale(path: str) -> bool:
    """Remove the socket of a process that has died. Returns whether the path is free. Raises OSError."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is another file")
    except FileNotFoundError:
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # the other process may accept no connections at present
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return True
        except BlockingIOError:
            return False
    return False


def open_connection(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """Connect a client. Raises OSError, among them ssl.SSLError."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        sock.connect(address.path)
        return sock
    sock = socket.create_connection((address.host, address.port), timeout_s)
    tune(sock)
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=address.host)
    except OSError as error:
        sock.close()
        if isinstance(error, ConnectionError):
            raise ssl.SSLError("the connection was closed during the handshake") from error
        raise


def tls_reason(error: ssl.SSLError) -> str:
    """OpenSSL's word for an error, without its source line."""
    return str(getattr(error, "reason", None) or error.args[-1])


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect the loss of a peer's machine."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)


# -- tensors ----------------------------------------------------------------------------------------------------------


def create_shared_memory(num_bytes: int) -> int:
    """A descriptor of memory to send to another process. It is sealed: a peer that shrank it would crash its reader."""
    descriptor = os.memfd_create("vlora-split", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def map_memory(descriptor: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] over a descriptor's memory."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED), dtype=torch.uint8)


def carve(memory: torch.Tensor, dtype: torch.dtype, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    """Tensors [rows, width], one after another in uint8 memory."""
    found, start = [], 0
    for width in widths:
        size = rows * width * dtype.itemsize
        found.append(memory[start : start + size].view(dtype).view(rows, width))
        start += size
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory."""
    array: Any = tensor.detach().contiguous().view(torch.uint8).numpy()
    return memoryview(array).cast("B")
