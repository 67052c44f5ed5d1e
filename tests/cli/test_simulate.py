"""`vlora simulate` with many replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vlora
from vlora.cli.cluster_options import RULES as OPTION_RULES
from vlora.routing import RULES, Need, RecordedRouter, Room


def test_the_rules_of_the_option_are_all_rules() -> None:
    assert tuple(RULES) == OPTION_RULES


def test_replicas_and_rules_are_options(vlora_command: Vlora) -> None:
    command = ("simulate", "gamma:rate=3", "--requests", "60", "--replicas", "3", "--rule", "where_it_is", "--json")
    code, out, _ = vlora_command(*command, "--mtbf-s", "20", "--report-s", "0.1", "--report-age-s", "1")
    found = json.loads(out)
    assert code == 0 and found["requests"] == 60
    assert found["routing"]["rule"] == "where_it_is" and found["policy"] == "cost_based" and not found["quick"]
    code, out, _ = vlora_command(*command, "--quick", "--max-replicas", "5")
    assert code == 0 and json.loads(out)["policy"] == "unmerged_only"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "4", "--max-replicas", "2"), "max_replicas is 2; it must be at least replicas, 4"),
        (("--rule", "random"), "'random' is not one of 'placed', 'punica'"),
        (("--over", "0.5"), "0.5 is not in the range"),
        (("--quick", "--policy", "dlora"), "leave --policy dlora out"),
    ],
)
def test_invalid_options_are_one_line(vlora_command: Vlora, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = vlora_command("simulate", "gamma", *arguments)
    assert code == 2 and message in err


def test_recorded_routing_is_repeated_and_a_difference_is_shown(vlora_command: Vlora, tmp_path: Path) -> None:
    file = tmp_path / "routing.jsonl"
    lines: list[bytes] = []
    router = RecordedRouter(lines.append, rule="placed")
    router.join("a", Room(1, 100))
    router.submit(Need("1", None, 1, 0))
    file.write_bytes(b"\n".join(lines) + b"\n")
    command = ("simulate", "--replay", str(file))
    assert vlora_command(*command)[:2] == (0, "2 calls of the router, each with the recorded result\n")
    file.write_bytes(file.read_bytes().replace(b'"a"]]]', b'"b"]]]'))
    code, out, _ = vlora_command(*command)
    assert code == 1 and out.startswith("call 2, submit, differs: recorded [[['1', None,") and ", 'b']], now [" in out
    code, out, _ = vlora_command(*command, "--json")
    assert code == 1 and json.loads(out)["num_calls"] == 1
    code, _, err = vlora_command(*command, "gamma")
    assert code == 2 and err == f"error: --replay repeats {file}; leave the TRACE 'gamma' out\n"
    code, _, err = vlora_command("simulate")
    assert code == 2 and err == "error: vlora simulate needs a TRACE, a CSV file or a workload, or --replay FILE\n"
    file.write_bytes(b"no journal\n")
    code, _, err = vlora_command(*command)
    assert code == 2 and err.startswith(f"error: {file}: line 1 is no line of a record of routing: ")
