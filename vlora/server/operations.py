"""How the front end performs an operator's calls, which RPyC and HTTP have in common."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vlora import operations as op
from vlora.cluster.cluster import Cluster
from vlora.config import Token
from vlora.errors import BadRequest, DeadlineMissed, Forbidden, UnknownReplica
from vlora.learning.sample_store import Corrector
from vlora.server.active_requests import reporting
from vlora.server.frontend import FrontEnd
from vlora.server.security.access import is_admin, name_of
from vlora.server.streams.cameras import TENANT, Cameras, shown_source

if TYPE_CHECKING:
    from vlora.learning.learning import Learning

OPERATOR = "operator"
"""The name of a caller in audit logs, on a server without tokens."""
_SHOWN = 200  # characters of an argument
_MAX_KEYS = 64  # of an argument: a refused call must not fill the log

audit_log = logging.getLogger("vlora.audit")


async def perform(front_end: FrontEnd, operation: op.Operation, caller: Token | None, origin: str) -> Any:
    """The result of an operation, with what only admins may see (`shown_to`).

    Args:
        caller: Its token, which the surface has checked; None on a server without tokens, where every caller is an
            operator.
        origin: The surface and the caller's address, for the audit log.

    Raises:
        Forbidden: The operation needs an admin token, and the caller's is none.
    """
    if not operation.admin:
        return await _perform(front_end, operation, caller)
    arguments = {key: _recorded(value) for key, value in msgspec.structs.asdict(operation).items()}
    check_permitted(type(operation), caller, origin, arguments)
    with reporting(functools.partial(_record, type(operation), caller, origin, arguments)):
        return await _perform(front_end, operation, caller)


def check_permitted(
    kind: type[op.Operation], caller: Token | None, origin: str, arguments: Mapping[str, Any] = {}
) -> None:
    """Raises Forbidden for an operation that needs an admin token, if the caller's is none. It is in the audit log."""
    if kind.admin and not is_admin(caller):
        _record(kind, caller, origin, arguments, Forbidden.code)
        raise Forbidden("this call requires an admin token")


def _record(
    kind: type[op.Operation], caller: Token | None, origin: str, arguments: Mapping[str, Any], outcome: str
) -> None:
    fields = {"by": name_of(caller) or OPERATOR, "from": origin, "result": outcome, "arguments": arguments}
    audit_log.info(kind.__name__, extra={"fields": fields})


def _recorded(value: Any) -> Any:
    """An argument without what may be a secret: of a URL its host, of files and a camera's description their names."""
    if isinstance(value, dict):
        names = [key for key in itertools.islice(value, _MAX_KEYS) if re.fullmatch(r"[\w.-]{1,100}", key)]
        shown = {key: value[key] for key in names if key in ("name", "paused") and isinstance(value[key], str | bool)}
        return {key: _recorded(shown[key]) if key in shown else "..." for key in names}
    return shown_source(value)[:_SHOWN] if isinstance(value, str) else value


async def _perform(front_end: FrontEnd, operation: op.Operation, caller: Token | None) -> Any:
    adapters, name = front_end.adapters, name_of(caller) or OPERATOR
    match operation:
        case op.GetStats():
            return await front_end.stats()
        case op.GetAdapters():
            return await adapters.list()
        case op.LoadAdapter(adapter, path):
            return await adapters.load(adapter, path)
        case op.UploadAdapter(adapter, files):
            assert front_end.received is not None, "the server has set it before it takes requests"
            return await front_end.received.upload(adapter, files)
        case op.UnloadAdapter(adapter, drain):
            return await adapters.unload(adapter, drain)
        case op.PinAdapter(adapter, pinned):
            return await adapters.pin(adapter, pinned)
        case op.Train(plan):
            return await adapters.train(plan)
        case op.Correct(request_id, label):
            by = Corrector(None, True) if caller is None else Corrector(caller.name, caller.admin)
            return await _learning(front_end).correct(request_id, label, by)
        case op.GetLearning():
            return () if front_end.learning is None else await front_end.learning.statuses()
        case op.Promote(adapter, version, path, force):
            return await _learning(front_end).get(adapter).promote(name, version=version, path=path, force=force)
        case op.RollBack(adapter, version):
            return await _learning(front_end).get(adapter).roll_back(name, version)
        case op.GetCluster():
            return _cluster(front_end).status()
        case op.GetAdapterPlaces():
            return await _cluster(front_end).adapter_places()
        case op.DrainReplica() | op.ResumeReplica() | op.Scale():
            return await _cluster(front_end).call(operation)
        case op.GetCameras():
            return () if front_end.cameras is None else front_end.cameras.statuses()
        case op.GetFrame(camera, wait_s):
            state = _cameras(front_end).get(camera).state
            image = await front_end.streams.next_image(TENANT, camera, wait_s)
            if image is None:
                raise DeadlineMissed(f"camera {camera!r} sent no frame within {wait_s:g} s; its state is {state}")
            return image
        case op.AddCamera() | op.ChangeCamera() | op.RemoveCamera():
            return await _cameras(front_end).perform(operation, caller)
        case _:
            return await front_end.engine.call(operation)


def _learning(front_end: FrontEnd) -> Learning:
    if front_end.learning is None:
        raise BadRequest("no adapter of this server learns; start it with --learn PLAN")
    return front_end.learning


def _cameras(front_end: FrontEnd) -> Cameras:
    if front_end.cameras is None:
        raise BadRequest("this server reads no cameras; start it with --camera-hosts or --camera-paths")
    return front_end.cameras


def _cluster(front_end: FrontEnd) -> Cluster:
    if front_end.cluster is None:
        raise UnknownReplica("this server has one engine; start it with --replicas 2 or more to have replicas")
    return front_end.cluster
