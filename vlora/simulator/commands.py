"""The implementation of `vlora simulate`: load traffic and costs, replay, format the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlora.errors import BadConfig
from vlora.routing.journal import Replayed, replay_file
from vlora.simulator.cluster_config import ClusterConfig
from vlora.simulator.machine import MEASURED, read_costs
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.workloads import among_tenants, arrivals_of, is_file, make_workload
from vlora.simulator.world import replay

_MOST_EXACT = 16  # replicas of which each step is simulated by default
_QUICK_POLICY = "unmerged_only"


def simulate(
    trace: str,
    *,
    num_adapters: int,
    num_requests: int | None,
    num_tenants: int,
    seed: int,
    costs: Path | None,
    quick: bool | None,
    policy: str | None,
    settings: Mapping[str, Any],
    cluster: Mapping[str, Any],
) -> dict[str, Any]:
    """Replay traffic and return the measures.

    Args:
        trace: A CSV file or a workload's name.
        num_adapters: Adapters of a workload, or of a trace that names none.
        num_requests: Limit on the number of requests; None is 1000 for a workload and no limit for a trace.
        quick: Simulate stretches of unmerged steps; None: with many replicas, unless a policy is chosen.
        settings: Further fields of `ReplicaConfig`.
        cluster: Fields of `ClusterConfig`.

    Raises:
        BadConfig: An argument is invalid.
    """
    arrivals = arrivals_of(trace, num_adapters, num_requests, seed)
    prefix_cache = not is_file(trace) and getattr(make_workload(trace), "prefixes", 0) > 0
    if num_tenants:
        arrivals = among_tenants(arrivals, num_tenants, seed)
    replicas = ClusterConfig(**cluster, seed=seed)
    if quick is None:
        quick = max(replicas.replicas, replicas.max_replicas or 1) > _MOST_EXACT and policy in (None, _QUICK_POLICY)
    if quick and policy not in (None, _QUICK_POLICY):
        raise BadConfig(f"quick replicas run unmerged steps; leave --policy {policy} out, or give --full")
    machine, load_s = read_costs(costs or MEASURED)
    if quick:
        policy = _QUICK_POLICY
    chosen = settings if policy is None else {"policy": policy, **settings}
    config = ReplicaConfig(costs=machine, load_s=load_s, prefix_cache=prefix_cache, **chosen)
    measures = replay(arrivals, config, dataclasses.replace(replicas, quick=quick))
    return {
        "trace": trace,
        "policy": config.policy,
        "replicas": replicas.replicas,
        "quick": quick,
        **measures.as_dict(),
    }


def repeat(journal: str) -> Replayed:
    """Repeat the routing that a server has recorded. Raises BadConfig for a file that is no record."""
    return replay_file(journal)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    routing = found["routing"]
    yield (
        f"{found['trace']}, policy {found['policy']}, {found['replicas']} replica{'s' * (found['replicas'] != 1)}"
        + (f", rule {routing['rule']}" if routing else "")
        + (", stretches of unmerged steps" if found["quick"] else "")
    )
    if not found["requests"]:
        yield (
            f"  no request was answered; {found['refused']} were refused as too long for the memory, "
            f"{found['unreachable']} because their bound on the first token could not be met"
        )
        return
    yield (
        f"  throughput             {found['requests_per_s']:.3f} requests/s: {found['requests']} in "
        f"{found['simulated_s']:.1f} s, {found['refused']} refused"
    )
    yield f"  average token latency  {found['average_token_latency_ms']:.2f} ms (all requests' latency / all tokens)"
    yield f"  request latency, mean  {found['mean_latency_s']:.3f} s"
    yield "  time to first token    " + ", ".join(f"{name} {value:.3f} s" for name, value in found["ttft_s"].items())
    if found["unreachable"] or found["late"]:
        yield (
            f"  bound on first token   {found['unreachable']} refused as unreachable"
            + "".join(f", {name} {value:.3f} s" for name, value in found["refusal_s"].items())
            + f"; {found['late']} of {found['requests']} answered late"
        )
    if not found["quick"]:
        yield (
            f"  longest wait           {found['longest_wait_s']:.3f} s for the next step; the waiting bound is "
            f"{found['wait_bound_s']:.3f} s"
        )
    shares = ", ".join(f"{mode} {share:.1%}" for mode, share in found["steps_by_mode"].items())
    yield f"  steps                  {found['steps']}: {shares}"
    if not found["quick"]:
        yield f"  switches               {found['switches']}, taking {found['switch_s']:.2f} s"
    yield f"  preemptions            {found['preemptions']}"
    yield f"  adapter loads          {found['adapter_loads']}"
    if found["reused_tokens"]:
        yield f"  prefix cache           {found['reused_tokens']} prompt tokens reused"
    if routing:
        yield from _routing_lines(routing)
    for name, tenant in found["tenants"].items():
        share = "" if tenant["share"] is None else f"; {tenant['share']:.1%} of the tokens under contention"
        yield f"  {name:<22} {tenant['requests']} answered, {tenant['unreachable']} refused{share}"
        if tenant["ttft_s"]:
            first = ", ".join(f"{percent} {value:.3f} s" for percent, value in tenant["ttft_s"].items())
            yield f"    time to first token  {first}"


def _routing_lines(routing: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  replicas with requests {routing['active_replicas']:.1f} on average, with "
        f"{routing['requests_while_busy']:.1f} requests each"
    )
    yield f"  router's queue         at most {routing['most_waiting']} requests"
    if routing["moves"] or routing["evictions"]:
        yield f"  moved requests         {routing['moves']} by the router, {routing['evictions']} from full KV memory"
    if routing["failures"]:
        yield (f"  failed replicas        {routing['failures']}; {routing['resubmitted']} requests continued elsewhere")
    if routing["recomputed_tokens"]:
        yield f"  computed again         {routing['recomputed_tokens']} tokens of moved and continued requests"
