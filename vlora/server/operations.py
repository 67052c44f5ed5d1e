"""How the front end performs an operator's calls, which RPyC and HTTP have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlora import operations as op
from vlora.config import Token
from vlora.errors import BadRequest
from vlora.learning.sample_store import Corrector
from vlora.server.frontend import FrontEnd

if TYPE_CHECKING:
    from vlora.learning.learning import Learning

OPERATOR = "operator"
"""The name of a caller in the audit log, on a server without tokens."""


async def perform(front_end: FrontEnd, operation: op.Operation, caller: Token | None) -> Any:
    """The result of an operation, with what only admins may see (`shown_to`).

    Args:
        caller: Its token, which the surface has checked; None on a server without tokens, where every caller is an
            operator.
    """
    adapters, replicas = front_end.adapters, front_end.replicas
    name = OPERATOR if caller is None else caller.name
    match operation:
        case op.GetStats():
            return await front_end.stats()
        case op.GetAdapters():
            return await adapters.list()
        case op.LoadAdapter(adapter, path):
            return await adapters.load(adapter, path)
        case op.UnloadAdapter(adapter, drain):
            return await adapters.unload(adapter, drain)
        case op.PinAdapter(adapter, pinned):
            return await adapters.pin(adapter, pinned)
        case op.Train(plan):
            return await adapters.train(plan)
        case op.ListTrainings() | op.CancelTraining():
            return await front_end.engine.call(operation)
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
            return await replicas.status()
        case op.GetAdapterPlaces():
            return await replicas.adapters()
        case op.DrainReplica(replica, wait_s):
            return await replicas.drain(replica, wait_s)
        case op.ResumeReplica(replica):
            return await replicas.resume(replica)
        case op.Scale(number, wait_s):
            return await replicas.scale(number, wait_s)
        case _:
            raise AssertionError(f"no front end performs {type(operation).__name__}")


def _learning(front_end: FrontEnd) -> Learning:
    if front_end.learning is None:
        raise BadRequest("no adapter of this server learns; start it with --learn PLAN")
    return front_end.learning
