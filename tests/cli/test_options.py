"""Help under headings, choices, and short forms."""

from __future__ import annotations

import itertools
import json
import re

import click
import pytest

from tests.cli.conftest import Vlora
from vlora.cli.group import cli
from vlora.cli.options import HeadedOption, long_flag
from vlora.config import POLICY_ALIASES, POLICY_NAMES, EngineConfig
from vlora.errors import BadConfig
from vlora.orchestrator.policies.registry import POLICIES


def test_options_of_serve_are_grouped_under_headings(vlora_command: Vlora) -> None:
    _, out, _ = vlora_command("serve", "--help")
    headings = re.findall(r"^(\w+):$", out, re.MULTILINE)
    assert headings == [
        *("Model", "Adapters", "Replicas", "Network", "Log"),
        *("Scheduling", "Training", "Memory", "Limits", "Options"),
    ]
    sections = dict(zip(headings, re.split(r"^\w+:$", out, flags=re.MULTILINE)[1:], strict=True))
    assert "--http-port" in sections["Network"] and "--adapter " in sections["Adapters"]
    assert re.findall(r"--[\w-]+", sections["Options"]) == ["--help"]
    for option in cli.commands["serve"].params:
        assert isinstance(option, HeadedOption) and out.count(f"--{long_flag(option)} ") >= 1


def test_each_policy_has_its_own_help_line(vlora_command: Vlora) -> None:
    _, out, _ = vlora_command("serve", "--help")
    section = out[out.index("--policy [") : out.index("--max-batch-size")]
    assert set(POLICY_NAMES) == set(POLICIES)
    for name in POLICY_NAMES:
        assert re.search(rf"^\s+{name} {{2,}}\w+", section, re.MULTILINE), name


@pytest.mark.parametrize(
    ("flag", "known"), [("--policy", "'cost_based', 'algorithm1'"), ("--dtype", "'auto', 'float32'")]
)
def test_an_invalid_choice_lists_the_valid_ones(vlora_command: Vlora, flag: str, known: str) -> None:
    code, _, err = vlora_command("serve", flag, "quick")
    assert code == 2 and f"invalid value for '{flag}': 'quick' is not one of {known}" in err


def test_a_policy_from_any_source_is_checked() -> None:
    with pytest.raises(BadConfig, match="policy is 'quick'; choose one of cost_based, algorithm1, dlora"):
        EngineConfig(model="m", policy="quick")


@pytest.mark.parametrize(("former", "current"), POLICY_ALIASES.items())
def test_former_policy_names_are_accepted_with_a_warning(
    vlora_command: Vlora, caplog: pytest.LogCaptureFixture, former: str, current: str
) -> None:
    code, out, _ = vlora_command("simulate", "gamma", "--requests", "3", "--policy", former, "--json")
    assert code == 0 and json.loads(out)["policy"] == current
    assert [record.getMessage() for record in caplog.records] == [
        f"the policy name {former!r} is deprecated and will be removed in the next release; use {current!r}"
    ]


def test_short_options_mean_the_same_in_every_command() -> None:
    meanings: dict[str, set[str]] = {}
    commands = itertools.chain.from_iterable(
        command.commands.values() if isinstance(command, click.Group) else [command]
        for command in cli.commands.values()
    )
    for command in commands:
        for option in command.params:
            if isinstance(option, click.Option):
                for flag in option.opts:
                    if not flag.startswith("--"):
                        meanings.setdefault(flag, set()).add(long_flag(option))
    assert {"-a", "-m", "-p", "-q", "-s"} <= meanings.keys()
    assert all(len(flags) == 1 for flags in meanings.values()), meanings


def test_short_forms_work(vlora_command: Vlora, address: str, image: str) -> None:
    assert vlora_command("query", image, "-q", "say:x", "-a", "cam", "-s", address) == (0, "x\n", "")
    assert vlora_command("batch", image, "-q", "say:x", "-s", address)[1].endswith("  x\n")
