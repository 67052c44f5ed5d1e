"""Routing: which of many replicas gets which request. Pure Python; no clock, no transport, no models.

Reading order: `replica_load.py` (one replica as the router knows it), `router.py` (the interface), `rules.py`,
`waiting.py` (the queue), `placement.py` (where adapters are), `prefixes.py`, `fleet.py` (the indexes), `journal.py`
(records of decisions and their replay), `scaling.py` (how many replicas).
"""

from vlora.routing.journal import RecordedRouter, Replayed, replay_calls, replay_file
from vlora.routing.placement import Group, MoveCosts, Shift, proactive, reactive
from vlora.routing.replica_load import Need, ReplicaLoad, Report, Room
from vlora.routing.router import Advice, Eviction, Move, Placed, Recalled, Refusal, Refused, Router
from vlora.routing.rules import RULES, Rule
from vlora.routing.scaling import ScalingPolicy, ScalingSettings

__all__ = [
    "RULES",
    "Advice",
    "Eviction",
    "Group",
    "Move",
    "MoveCosts",
    "Need",
    "Placed",
    "Recalled",
    "RecordedRouter",
    "Refusal",
    "Refused",
    "Replayed",
    "ReplicaLoad",
    "Report",
    "Room",
    "Router",
    "Rule",
    "ScalingPolicy",
    "ScalingSettings",
    "Shift",
    "proactive",
    "reactive",
    "replay_calls",
    "replay_file",
]
