"""Options of all commands: help, flags of the settings, their sources, choices, completion, and JSON output."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import vlora.cli
import vlora.cli.serve
from fusion.block_diagonal.convert import Conversion, ConvertedLayer
from fusion.block_diagonal.distil import DistillationScores
from tests.cli.conftest import Vlora
from tests.server.scripted import write_adapter
from vlora.bench.report import Goal, Report
from vlora.cli.group import cli, refuse_unknown
from vlora.cli.options import HeadedOption, long_flag
from vlora.cli.progress import counting, waiting
from vlora.config import POLICY_NAMES, EngineConfig, ServerConfig
from vlora.config import RULES as OPTION_RULES
from vlora.errors import BadConfig
from vlora.orchestrator.policies.registry import POLICIES
from vlora.parallel.adapter_sharding import Blocks
from vlora.routing import RULES, Need, RecordedRouter, Room

COMMANDS = sorted(cli.commands)
SERVE = cli.commands["serve"]


def commands(group: click.Group = cli, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(vlora_command: Vlora, command: str) -> None:
    assert f"  vlora {command}" in vlora_command.out(command, "--help").split("\n\n")[2], "a summary, then an example"


def test_help_lists_the_commands_and_the_exit_codes(vlora_command: Vlora) -> None:
    out = vlora_command.out()
    assert out == vlora_command.out("--help") and out.startswith("Usage: vlora")
    assert all(word in out for word in (*COMMANDS, "Exit codes", "130", "143", "VLORA_SERVE_HTTP_PORT"))


def test_options_of_serve_are_grouped_under_headings(vlora_command: Vlora) -> None:
    out = vlora_command.out("serve", "--help")
    headings = ["Model", "Adapters", "Replicas", "Network", "Log"]
    headings += ["Scheduling", "Training", "Memory", "Limits", "Options"]
    assert re.findall(r"^(\w+):$", out, re.MULTILINE) == headings
    sections = dict(zip(headings, re.split(r"^\w+:$", out, flags=re.MULTILINE)[1:], strict=True))
    assert "--http-port" in sections["Network"] and "--adapter " in sections["Adapters"]
    assert re.findall(r"--[\w-]+", sections["Options"]) == ["--help"]
    for option in SERVE.params:
        assert isinstance(option, HeadedOption) and out.count(f"--{long_flag(option)} ") >= 1
    assert set(POLICY_NAMES) == set(POLICIES), "describe the policies of policies/registry.py in vlora/config.py"
    assert tuple(RULES) == OPTION_RULES
    policies = out[out.index("--policy [") : out.index("--max-batch-size")]
    for name in POLICY_NAMES:
        assert re.search(rf"^\s+{name} {{2,}}\w+", policies, re.MULTILINE)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_setting_is_a_flag_with_its_own_default_and_a_help_text(config: type) -> None:
    options = {option.name: option for option in SERVE.params}
    for field in dataclasses.fields(config):
        if field.name == "tokens":
            continue  # secrets are never passed on a command line
        option = options[field.name]
        assert isinstance(option, click.Option) and option.help, f"--{field.name} has no help text"
        if field.name not in ("model", "serve_base"):  # the latter's flag has addresses only
            assert option.default == field.default
    for flag, value in (("--no-prefix-cache", False), ("--prefix-cache", True)):
        assert SERVE.make_context("serve", [flag]).params["prefix_cache"] is value


def test_short_options_mean_the_same_in_every_command() -> None:
    meanings: dict[str, set[str]] = {}
    for _, command in commands():
        for option in command.params:
            if isinstance(option, click.Option):
                for flag in (flag for flag in option.opts if not flag.startswith("--")):
                    meanings.setdefault(flag, set()).add(long_flag(option))
    assert {"-a", "-m", "-p", "-q", "-s"} <= meanings.keys()
    assert all(len(flags) == 1 for flags in meanings.values()), meanings


@pytest.mark.parametrize("args", [["gpu-check"], ["convert-lora", "."], ["convert-bd", "."]], ids=" ".join)
def test_required_options_are_required(args: list[str]) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2 and "Missing option" in result.output


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What `serve` receives."""
    found: dict[str, object] = {}
    monkeypatch.setattr(SERVE, "callback", lambda **settings: found.update(settings))
    return found


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("variables", [0, 1])
@pytest.mark.parametrize("file", [0, 1])
def test_flags_override_the_environment_which_overrides_the_file(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: int, variables: int, flags: int
) -> None:
    (config := tmp_path / "vlora.yaml").write_text("serve: {theta-s: 3}\n")
    if variables:
        monkeypatch.setenv("VLORA_SERVE_THETA_S", "2")
    args = [*["--config", str(config)] * file, "serve", *["--theta-s", "1"] * flags]
    assert cli.main(args, prog_name="vlora", standalone_mode=False) is None
    assert settings["theta_s"] == (1 if flags else 2 if variables else 3 if file else 0.1)


def test_the_environment_may_name_the_file_and_the_file_may_have_lists(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = "weight: [signs=2, '*=1'], image-hosts: example.org, prefix-cache: false, theta-s: null, replicas: 1:4"
    (tmp_path / "vlora.yaml").write_text(f"serve: {{{values}}}\n")
    monkeypatch.setenv("VLORA_CONFIG", str(tmp_path / "vlora.yaml"))
    cli.main(["serve"], prog_name="vlora", standalone_mode=False)
    expected = {"weight": ("signs=2", "*=1"), "image_hosts": ("example.org",), "prefix_cache": False, "theta_s": 0.1}
    expected |= {"replicas": "1:4"}  # not a number of base 60
    assert {name: settings[name] for name in expected} == expected


def test_every_option_has_a_variable_named_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VLORA_LOG_LEVEL", "VLORA_LOG_JSON"):  # set by a server started earlier in this process
        monkeypatch.delenv(variable, raising=False)
    for name, command in commands():
        prefix = f"VLORA_{name}".upper().replace("-", "_").replace(" ", "_")
        # An earlier direct call, as in tests, must not fix the name.
        command.parse_args(click.Context(command, resilient_parsing=True), [])
        context = click.Context(command, auto_envvar_prefix=prefix, resilient_parsing=True)
        command.parse_args(context, [])
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar != "VLORA_SERVER":
                monkeypatch.setenv(variable := f"{prefix}_{long_flag(option).upper().replace('-', '_')}", "mine")
                assert option.resolve_envvar_value(context) == "mine", variable


KUBERNETES = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
KNOWN = (
    *("CONFIG", "TOKEN", "ADMIN_TOKEN", "SERVER", "TLS_CA", "LOG_LEVEL", "SERVE_HTTP_PORT", "SERVE_ADAPTER"),
    *("STATUS_WAIT_S", "FUSE_RESTART", "ADAPTERS_LOAD_SERVER", "MODEL_EVAL_QUICK", "CONVERT_BD_BLOCKS"),
)


def test_variables_that_no_command_reads_are_refused_with_the_closest_known_one() -> None:
    def check(**environ: str) -> None:
        refuse_unknown(cli, "VLORA", environ)

    for name in (*(f"VLORA_{each}" for each in KNOWN), "PATH", "VLORAX_SERVE", "MY_VLORA_SERVE"):
        check(**{name: "1"})
    services = {f"VLORA_{each}": "8000" if "SERVICE" in each else "tcp://10.0.0.7:8000" for each in KUBERNETES}
    check(**services | {"VLORA_SERVER_SERVICE_HOST": "10.0.0.7", "VLORA_SERVER_PORT": "tcp://10.0.0.7:18861"})
    for name, meant in (("SERVE_HTPP_PORT", "SERVE_HTTP_PORT?"), ("TOKENS", "TOKEN?"), ("QZX", "; unset it")):
        with pytest.raises(BadConfig, match=f"no command reads the environment variable VLORA_{name}") as refused:
            check(**{f"VLORA_{name}": "8000"})
        assert str(refused.value).endswith(meant if meant[0] == ";" else f"did you mean VLORA_{meant}")


def test_a_models_name_and_its_adapters_come_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen2-vl").mkdir()
    monkeypatch.chdir(tmp_path)
    for model in (f"{tmp_path}/qwen2-vl", f"{tmp_path}/qwen2-vl/", "qwen2-vl", "./qwen2-vl/."):
        assert vlora.cli.serve.served_name(model) == "qwen2-vl", "its folder is not shown"
    for model in ("Qwen/Qwen2-VL-2B-Instruct", "embedded"):
        assert vlora.cli.serve.served_name(model) == model
    for name in ("signs", "cam"):
        write_adapter(tmp_path / name)
    found = vlora.cli.serve.named_adapters((f"extra={tmp_path}/x=y",), tmp_path)
    assert found == {"cam": str(tmp_path / "cam"), "signs": str(tmp_path / "signs"), "extra": f"{tmp_path}/x=y"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(vlora_command: Vlora, tmp_path: Path, shell: str) -> None:
    if shell == "bash" and not shutil.which("bash"):
        pytest.skip("no bash here")
    out = vlora_command.out("completion", shell)
    assert "_VLORA_COMPLETE" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")]).returncode == 0


def test_every_command_that_reports_has_json() -> None:
    without = {name for name, command in commands() if "as_json" not in {each.name for each in command.params}}
    servers = {"serve", "base serve", "mcp"}
    assert without == servers | {"completion"}, "three run until they are stopped, the other prints a script"


@pytest.mark.parametrize(
    ("command", "runs"), [(("fuse", "demo", "--out", "x"), "fusion.run.fuse"), (("demo",), "apps.demo.run")]
)
def test_with_json_progress_is_written_to_stderr(
    vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], runs: str
) -> None:
    def run(*args: object, console: Console, **options: object) -> dict[str, int]:
        console.print("training")
        return {"adapters": 2}

    monkeypatch.setattr(runs, run)
    assert vlora_command(*command) == (0, "training\n", "")
    assert vlora_command(*command, "--json") == (0, '{"adapters":2}\n', "training\n")


def test_with_json_a_bench_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("step", [{"what": "a", "ms": 1.5}], [Goal("ratio", 1.0, 1.2, True)])
    report.print()
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "vlora bench step" in table and "holds: ratio" in table
    report.print(only_json=True)
    assert capsys.readouterr().out.rstrip() == line and json.loads(line)["rows"] == [{"what": "a", "ms": 1.5}]
    with counting("pictures", 2) as advance, waiting("loading") as done:
        advance()
        done()
    assert capsys.readouterr() == ("", ""), "without a terminal no progress is shown"


def test_a_conversion_is_reported_as_text_or_json(vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [ConvertedLayer("q_proj", Blocks("a", 2), 4, 0.25), ConvertedLayer("fc", None, 8, 0.0)]
    conversion = Conversion(layers, [DistillationScores("signs", 0.9, 0.5, 0.8, 0.3, 0.1)])
    monkeypatch.setattr("fusion.block_diagonal.convert.convert", lambda *_, **__: conversion)
    command = ("convert-bd", "signs", "--blocks", "2")
    out = vlora_command.out(*command)
    assert "rank 4, error 0.2500" in out and out.endswith("written to signs-bd2\n")
    shown = [
        {"layer": "q_proj", "blocks": ["a", 2], "rank": 4, "error": 0.25},
        {"layer": "fc", "blocks": None, "rank": 8, "error": 0.0},
    ]
    (found,) = vlora_command.json(*command)
    assert found == {"out": "signs-bd2", "layers": shown, "domains": [conversion.domains[0]._asdict()]}


def test_simulate_takes_replicas_and_rules(vlora_command: Vlora) -> None:
    command = ("simulate", "gamma:rate=3", "--requests", "60", "--replicas", "3", "--rule", "where_it_is")
    (found,) = vlora_command.json(*command, "--mtbf-s", "20", "--report-s", "0.1", "--report-age-s", "1")
    assert found["requests"] == 60 and found["routing"]["rule"] == "where_it_is"
    assert found["policy"] == "cost_based" and not found["quick"]
    assert vlora_command.json(*command, "--quick", "--max-replicas", "5")[0]["policy"] == "unmerged_only"


def test_recorded_routing_is_repeated_and_a_difference_is_a_failure(vlora_command: Vlora, tmp_path: Path) -> None:
    file = tmp_path / "routing.jsonl"
    lines: list[bytes] = []
    router = RecordedRouter(lines.append, rule="placed")
    router.join("a", Room(1, 100))
    router.submit(Need("1", None, 1, 0))
    file.write_bytes(b"\n".join(lines) + b"\n")
    command = ("simulate", "--replay", str(file))
    assert vlora_command.out(*command) == "2 calls of the router, each with the recorded result\n"
    file.write_bytes(file.read_bytes().replace(b'"a"]]]', b'"b"]]]'))
    out = vlora_command.out(*command, code=1)
    assert out.startswith("call 2, submit, differs: recorded [[['1', None,") and ", 'b']], now [" in out
    assert vlora_command.json(*command, code=1)[0]["num_calls"] == 1
