"""Certificates. Tests may be coroutines: they run on an event loop of their own, on a module's `LOOP` if it has one."""

from __future__ import annotations

import asyncio
import inspect
import ssl
from pathlib import Path

import pytest
import trustme


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(loop_factory=getattr(pyfuncitem.module, "LOOP", None)) as runner:
        runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Certificates:
    """A server's certificate and a client's, each with its issuing authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        server = self.authority.issue_cert("localhost", "127.0.0.1")
        self.key, self.cert = str(folder / "server.key"), str(folder / "server.pem")
        server.private_key_pem.write_to_path(self.key)
        server.cert_chain_pems[0].write_to_path(self.cert)
        self.client = self.authority.issue_cert("camera-7.example")

    def context(self, *, own: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if own is not None:
            own.configure_cert(context)
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))
