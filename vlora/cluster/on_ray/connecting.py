"""A driver's connection to a Ray: whether it can be used, and which front end uses a namespace of it."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
from ray._private import services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.experimental import internal_kv
from ray.job_config import JobConfig

from vlora.cluster.on_ray.reports import DriverSettings, Service
from vlora.errors import BadConfig
from vlora.wire.address import Address

_ANSWER_S = 2.0
MAX_CHARS = 600  # of a message of Ray


def find_address(address: str) -> str:
    """The control service's address. Ray would try for 45 s, or end the process without a raylet on this machine.

    Raises:
        BadConfig: There is no such Ray, or no node of it on this machine.
    """
    if "://" in address:
        raise BadConfig(
            f"--ray {address} is no address of a Ray cluster itself; write HOST:PORT of its head (port 6379 by default)"
        )
    if address != "auto":
        _check_listens(Address.parse(address))
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise BadConfig(
            f"--ray {address}: no Ray runs on this machine; run `ray start --address=HEAD:6379 --num-cpus=0` to join "
            "a cluster, or `ray start --head`"
        ) from error
    control = Address.parse(found or "")
    _check_listens(control)
    if not any(_is_same(Address.parse(each), control) for each in services.find_gcs_addresses()):
        host = f"{control}" if not control.is_local else "HEAD:PORT"
        raise BadConfig(
            f"this machine has no node of the Ray at {control}; run `ray start --address={host} --num-cpus=0` here, or "
            "start the server with `ray job submit`"
        )
    return str(found)


def _check_listens(control: Address) -> None:
    try:
        socket.create_connection(control[:2], _ANSWER_S).close()
    except OSError as error:
        raise BadConfig(f"nothing answers at {control}, the address of Ray's head: {error}") from error


def _is_same(one: Address, other: Address) -> bool:
    """Whether two addresses have the same port and machine. Some have a name, others a number."""
    with contextlib.suppress(OSError):
        return one.port == other.port and socket.gethostbyname(one.host) == socket.gethostbyname(other.host)
    return one == other


def connect(settings: DriverSettings, found: str) -> None:
    """found: The control service's address. Raises BadConfig with Ray's reason."""
    try:
        # These refuse a missing or wrong token at once, `ray.init` after many attempts.
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=found)
        # Actors are loaded from the installed package: Ray may forget the class with the driver that sent it, and would
        # then start its actors again without end.
        ray.init(
            address=settings.address if settings.address == "auto" else found,
            namespace=settings.namespace,
            job_config=JobConfig(code_search_path=[sys.prefix]),
            log_to_driver=False,  # the lines of replicas' logs come from their actors
            configure_logging=False,
            **settings.connection,
        )
    except Exception as error:
        raise BadConfig(f"the Ray at {settings.address} cannot be used: {line_of(str(error))}") from error


def line_of(text: str) -> str:
    return " ".join(text.split())[:MAX_CHARS]


store: Any = SimpleNamespace(
    get=internal_kv._internal_kv_get,  # noqa: SLF001
    put=internal_kv._internal_kv_put,  # noqa: SLF001
    delete=internal_kv._internal_kv_del,  # noqa: SLF001
)
"""Ray's own store of keys and values, in its head."""


class Lease:
    """The ownership of a namespace's service by one front end: an entry of Ray's own store that its driver renews.

    Front ends that follow note it in a second entry.

    Attributes:
        term: Of this front end since it took the service: larger than that of each owner before.
        is_followed: Whether one follows.
    """

    RENEW_S, STALE_S = 1.0, 10.0
    _OWNER, _FOLLOWED, _TERM = b"service", b"followed", b"term"

    def __init__(self, namespace: str, service: Service) -> None:
        self._namespace = f"vlora:{namespace}".encode()
        self._service = service
        self._what = namespace
        self._count = self.term = 0
        # As last seen, and since when.
        self._owner: tuple[tuple[Service, int, int] | None, float] = (None, -math.inf)
        self._followed: tuple[bytes | None, float] = (None, -math.inf)

    def take(self) -> Service | None:
        """Take the service, unless another front end owns it, which is returned. Call it every `RENEW_S` at least.

        Raises BadConfig if a front end of another service uses the namespace.
        """
        found, now = self._get(), time.monotonic()
        before, since_s = self._owner
        if found != before:
            self._owner = (found, now)
        if found is None and self._put(self._OWNER, (self._service, 0, 0), overwrite=False):
            return self.take()  # another one was first
        if found is None or found[0].key == self._service.key or (found == before and now - since_s > self.STALE_S):
            store.delete(self._FOLLOWED, namespace=self._namespace)
            self.term = found[1] if found is not None and found[0].key == self._service.key else 0
            if not self.term:  # otherwise another driver has it
                last = int(store.get(self._TERM, namespace=self._namespace) or 0)
                self.term = max(last + 1, time.time_ns())  # Ray's head may have lost the one before
                store.put(self._TERM, b"%d" % self.term, overwrite=True, namespace=self._namespace)
            return self.renew(first=True)
        if found[0].settings == self._service.settings:
            self._count += 1
            self._put(self._FOLLOWED, (self._service.key, self._count))
        elif before is not None and found != before:  # it lives
            other = " with other settings" if found[0].model == self._service.model else ""
            raise BadConfig(
                f"the Ray namespace {self._what!r} is in use by {found[0]}{other}; end it, or choose another "
                "--ray-namespace"
            )
        return found[0]

    def renew(self, *, first: bool = False) -> Service | None:
        """Returns another front end that has taken the service, with a larger term; None if this one has it."""
        if (found := self._get()) is None and not first:
            return self._service
        if found is not None and found[0].key != self._service.key and found[1] > self.term:
            return found[0]
        self._count += 1
        self._put(self._OWNER, (self._service, self.term, self._count))
        if (followed := store.get(self._FOLLOWED, namespace=self._namespace)) != self._followed[0]:
            self._followed = (followed, time.monotonic())
        return None

    @property
    def is_followed(self) -> bool:
        return time.monotonic() - self._followed[1] < 3 * self.RENEW_S

    def release(self) -> bool:
        """Returns whether this front end had the service."""
        if (found := self._get()) is None or found[0].key != self._service.key:
            return False
        store.delete(self._OWNER, namespace=self._namespace)
        return True

    def _get(self) -> tuple[Service, int, int] | None:
        value = store.get(self._OWNER, namespace=self._namespace)
        return None if value is None else msgspec.msgpack.decode(value, type=tuple[Service, int, int])

    def _put(self, key: bytes, value: Any, *, overwrite: bool = True) -> object:
        """Returns whether there was a value before; without `overwrite` it is kept."""
        return store.put(key, msgspec.msgpack.encode(value), overwrite=overwrite, namespace=self._namespace)
