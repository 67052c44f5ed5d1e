"""The command line: help, flags generated from the configuration, answers, and one-line errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

import vlora.cli
import vlora.cli.serve
from fusion.block_diagonal.convert import Conversion, ConvertedLayer
from fusion.block_diagonal.distil import DistillationScores
from tests.cli.conftest import Vlora
from tests.server.running import running_server
from tests.server.scripted import write_adapter
from vlora.config import EngineConfig, ServerConfig
from vlora.errors import BadPlan
from vlora.parallel.adapter_sharding import Blocks

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(vlora.cli.cli.commands)

NIGHT = ("--adapter", "cam", "--head", "night")


@pytest.fixture
def video(tmp_path: Path) -> str:
    """Two dark seconds, one bright, and a bright rest, at 10 frames per second."""
    path = str(tmp_path / "video.mp4")
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for place in range(34):
        writer.write(np.full((48, 64, 3), 20 if place < 20 else 230, np.uint8))
    writer.release()
    return path


# -- help and flags ---------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, vlora.cli; sys.argv = ['vlora', '--help']\n"
        "try: vlora.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'cv2', 'rpyc', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_query_loads_no_model_libraries(address: str, image: str) -> None:
    code = (
        f"import sys, vlora.cli; sys.argv = ['vlora', 'query', {image!r}, 'say:light', '--server', {address!r}]\n"
        "try: vlora.cli.main()\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'cv2', 'zmq'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE)
    assert done.stdout == b"light\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(vlora_command: Vlora, command: str) -> None:
    code, out, _ = vlora_command(command, "--help")
    assert code == 0 and f"  vlora {command}" in out.split("\n\n")[2], "a summary, then an example"


def test_without_a_command_help_is_shown(vlora_command: Vlora) -> None:
    code, out, _ = vlora_command()
    assert code == 0 and out.startswith("Usage: vlora") and all(command in out for command in COMMANDS)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_setting_is_a_flag_with_its_own_default_and_a_help_text(config: type) -> None:
    options = {option.name: option for option in vlora.cli.cli.commands["serve"].params}
    for field in dataclasses.fields(config):
        if field.name == "tokens":
            continue  # secrets are never passed on a command line
        option = options[field.name]
        assert option.help, f"--{field.name} has no help text"
        if field.name not in ("model", "serve_base"):  # the latter's flag has addresses only
            assert option.default == field.default


def test_flags_that_are_on_by_default_can_be_switched_off() -> None:
    serve = vlora.cli.cli.commands["serve"]
    for flag, value in (("--no-prefix-cache", False), ("--prefix-cache", True)):
        assert serve.make_context("serve", [flag]).params["prefix_cache"] is value


# -- queries ----------------------------------------------------------------------------------------------------------


def test_query_prints_the_answer_as_text_or_json(vlora_command: Vlora, address: str, image: str) -> None:
    assert vlora_command("query", image, "say:a grün sign", "--server", address) == (0, "a grün sign\n", "")
    code, out, _ = vlora_command(
        "query", image, "say:a.b", "--server", address, "--adapter", "cam", "--stop", ".", "--json"
    )
    answer = json.loads(out)
    assert code == 0 and (answer["text"], answer["adapter"], answer["finish_reason"]) == ("a", "cam", "stop")


def test_the_server_may_come_from_the_environment(
    vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLORA_SERVER", address)
    code, out, _ = vlora_command("adapters")
    assert code == 0 and "cam  rank 8" in out and "head night  classification over 2 frames: dark, bright" in out
    code, out, _ = vlora_command("adapters", "--json")
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["cam", "signs"]


def test_adapters_are_loaded_pinned_and_unloaded(vlora_command: Vlora, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "signs", {"kind": 1})
    with running_server() as running:
        server = ("--server", f"127.0.0.1:{running.port}")
        code, out, _ = vlora_command("adapters", "load", "signs", os.path.relpath(folder), *server)
        assert code == 0 and out.splitlines()[0] == "signs  rank 8  0.0 MiB  mergeable"
        code, out, _ = vlora_command("adapters", "load", "lights", folder, "--json", *server)
        assert code == 0 and json.loads(out)["name"] == "lights"
        code, out, _ = vlora_command("adapters", "pin", "signs", *server)
        assert code == 0 and out.splitlines()[0].endswith("  pinned")
        code, out, _ = vlora_command("adapters", "list", "--json", *server)
        assert [json.loads(line)["pinned"] for line in out.splitlines()] == [False, True]
        code, out, _ = vlora_command("adapters", "unpin", "signs", *server)
        assert code == 0 and not out.splitlines()[0].endswith("  pinned")
        assert vlora_command("adapters", "unload", "lights", "--drain", *server) == (0, "lights  unloaded\n", "")
        assert vlora_command("adapters", "unload", "signs", "--json", *server)[1] == '{"name":"signs","drain":false}\n'
        assert vlora_command("adapters", "list", *server) == (0, "no adapters\n", "")
        for command in (("unload", "signs"), ("pin", "signs"), ("load", "signs", str(tmp_path / "nothing"))):
            code, out, err = vlora_command("adapters", *command, *server)
            assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        code, _, err = vlora_command("adapters", *server, "unload", "signs")
        assert code == 2 and "write --server after 'unload'" in err


def test_registered_adapters_are_shown_as_not_loaded(vlora_command: Vlora, tmp_path: Path) -> None:
    with running_server() as running:
        running.on_loop(running.front_end.adapters.register({"later": write_adapter(tmp_path / "later")}))
        code, out, _ = vlora_command("adapters", "--server", f"127.0.0.1:{running.port}")
    assert code == 0 and out == "later  rank 8  0.0 MiB  read at first use\n"


def test_stream_prints_a_line_per_second_of_video(vlora_command: Vlora, address: str, video: str) -> None:
    args = ("stream", video, *NIGHT, "--server", address)
    code, out, err = vlora_command(*args)
    assert code == 0 and err == ""
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["0.0", "s", "dark"],
        ["1.0", "s", "dark"],
        ["2.0", "s", "bright"],
        ["3.0", "s", "bright"],
    ]
    code, out, _ = vlora_command(*args, "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["label"] for result in results] == ["dark", "dark", "bright", "bright"]
    assert all(result["latency_s"] > 0 and 0.5 < result["confidence"] <= 1 for result in results)


def test_failed_clips_are_reported_and_end_with_code_1(
    vlora_command: Vlora, address: str, video: str, tmp_path: Path
) -> None:
    late = ("--max-latency-s", "0.0000001")
    code, out, err = vlora_command("stream", video, *NIGHT, "--server", address, *late, "--out", str(tmp_path))
    assert (code, err) == (1, "") and out.count("the frame was not answered within the stream's 1e-07 s") == 4
    (rows,) = tmp_path.glob("*.jsonl")
    assert all(json.loads(line)["problem"] for line in rows.read_text().splitlines())


def test_several_heads_answer_at_a_chosen_rate(vlora_command: Vlora, address: str, video: str) -> None:
    heads = ("--adapter", "cam", "--head", "night", "--head", "day", "--fps", "2")
    code, out, err = vlora_command("stream", video, *heads, "--server", address)
    assert (code, err) == (0, "")
    words = sorted(tuple(line.split()[:4]) for line in out.splitlines())
    assert [line[:2] for line in words if line[0] == "night"] == [("night", f"{start}.0") for start in range(4)]
    assert [line[3] for line in words if line[0] == "day"] == ["dark"] * 4 + ["bright"] * 3


def test_heads_of_several_adapters_and_questions_answer_together(
    vlora_command: Vlora, address: str, video: str
) -> None:
    asked = ("--head", "cam/day", "--question", "say:hello", "--adapter", "signs", "--max-tokens", "3")
    code, out, err = vlora_command("stream", video, *asked, "--server", address)
    assert (code, err) == (0, "")
    lines = sorted(" ".join(line.split()[:5]) for line in out.splitlines())
    assert lines[0].startswith("cam-day 0.0 s dark ") and lines[4].startswith("signs-say-hello 0.0 s hel")
    assert lines[3].startswith("cam-day 3.0 s bright ")  # the rest
    assert len(lines) == 8, lines


# -- user errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["query"], "missing argument 'IMAGE... [QUESTION]'; see 'vlora query --help'"),
        (["nonsense"], "no such command 'nonsense'; see 'vlora --help'"),
        (["query", "IMAGE", "say:x", "--nonsense"], "no such option"),
        (["query", "IMAGE", "say:x", "--max-tokens", "many"], "invalid value for '--max-tokens'"),
        (["query", "IMAGE", "say:x", "--max-tokens", "0"], "max_tokens is 0; it must be at least 1"),
        (["query", "IMAGE", " "], "the prompt has images but no text, and the base model has no default question"),
        (["query", "nowhere.png", "say:x"], "cannot read image 'nowhere.png': No such file or directory"),
        (["query", __file__, "say:x"], "image 1 ("),
        (["query", "IMAGE", "say:x", "--adapter", "zzz"], "no adapter named 'zzz'; registered: cam, signs"),
        (["query", "IMAGE", "say:x", "--server", "zzz"], "--server is 'zzz'; write HOST:PORT"),
        (
            ["status", "--server", "127.0.0.1:99999"],
            "--server is '127.0.0.1:99999'; write HOST:PORT, with a port from 1 to 65535",
        ),
        (["status", "--server", "a..b:1"], "cannot reach a server at a..b:1"),
        (["batch", "IMAGE", "--question", "say:x", "--out", "/dev/full"], "cannot write '/dev/full': No space left"),
        (["query", "IMAGE", "say:x", "--server", "127.0.0.1:1"], "cannot reach a server at 127.0.0.1:1: "),
        (
            ["stream", "nowhere.mp4", "--adapter", "cam", "--head", "night"],
            "cannot read video 'nowhere.mp4': no such",
        ),
        (["stream", __file__, "--adapter", "cam", "--head", "night"], "it is not a video that this machine can decode"),
        (["stream", "IMAGE", "--adapter", "zzz", "--head", "night"], "no adapter named 'zzz'; registered: cam, signs"),
        (
            ["stream", "IMAGE", "--adapter", "cam", "--head", "zzz"],
            "adapter 'cam' has no head 'zzz'; its heads: night, day",
        ),
        (
            ["stream", "IMAGE", "--adapter", "signs", "--head", "day"],
            "its heads: none; head 'day' belongs to adapter 'cam'",
        ),
        (
            ["stream", "IMAGE", "--adapter", "cam", "--head", "day", "--head", "day"],
            "--head 'day' is given more than once",
        ),
        (
            ["stream", "IMAGE", "--adapter", "cam", "--head", "day", "--head", "cam/day"],
            "head 'day' of adapter 'cam' is given more than once; give it once",
        ),
        (["stream", "IMAGE", "--head", "day"], "--head is 'day'; also give its --adapter, or write ADAPTER/HEAD"),
        (["stream", "IMAGE", "--adapter", "cam"], "nothing is asked; give at least one --head or --question"),
        (["stream", "IMAGE", "--head", "zzz/day"], "no adapter named 'zzz'; registered: cam, signs"),
        (["stream", "IMAGE", "--head", "signs/day"], "its heads: none; head 'day' belongs to adapter 'cam'"),
        (["stream", "IMAGE", "--adapter", "zzz", "--question", "say:x"], "no adapter named 'zzz'"),
        (["stream", "IMAGE", "--question", "  "], "a question of the stream is empty; send a text"),
        (["stream", "IMAGE", "--question", "say:x", "--max-tokens", "0"], "max_tokens is 0; it must be at least 1"),
        (["stream", "IMAGE", "--adapter", "cam", "--head", "day", "--fps", "0"], "invalid value for '--fps'"),
        (["stream", "IMAGE", "--adapter", "cam", "--head", "day", "--fps", "nan"], "--fps is nan; it must be a number"),
        (["serve", "--adapter", "cam"], "--adapter is 'cam'; write NAME=PATH"),
        (["serve", "--adapter", "a=x", "--adapter", "a=y"], "adapter 'a' is given twice"),
        (["serve", "--adapter", "a=x", "--served-model-name", "a"], "adapter 'a' has the base model's name; rename it"),
        (["serve", "--adapters", "nowhere"], "nowhere: contains no folder with an adapter_config.json"),
        (["serve", "--max-batch-size", "0"], "max_batch_size is 0; it must be at least 1"),
        (["serve", "--theta-s", "nan"], "theta_s is nan; it must be above 0"),
        (["serve", "--image-hosts", "https://pictures.example"], "image_hosts is 'https://pictures.example', which"),
        (["serve", "--image-hosts", "pictures.example:8080"], "image_hosts is 'pictures.example:8080', which"),
        (["serve", "--image-hosts", "*.example"], "image_hosts is '*.example', which"),
        (["serve", "--load-format", "zzz"], "invalid value for '--load-format'"),
        (["adapters", "--tls-cert", "x.pem"], "--tls-cert requires TLS; also give --tls-ca"),
        (["adapters", "--tls-ca", "nowhere.pem"], "--tls-key cannot be used ('nowhere.pem'): "),
        (["serve", "--token-file", "nowhere.yaml"], "cannot read the token file 'nowhere.yaml'"),
        (["serve", "--tls-key", "x.pem"], "tls_cert and tls_key must be set together"),
        (["serve", "--host", "0.0.0.0"], "host is '0.0.0.0'; without authentication"),
        (["serve", "--model", "./nowhere"], "--model is './nowhere'; there is no such folder"),
        (["bench", "zzz"], "no bench named 'zzz'; choose one of "),
        (["bench", "memory", "--quick", "--out", "/proc/x"], "--out: the folder '/proc/x' cannot be created: "),
        (
            ["bench", "step", "--model", "llava-13b"],
            "are valid for `vlora bench policy` and `costs` only, not for 'step'",
        ),
        (["bench", "merge", "--quantize", "int8"], "--quantize is valid for `vlora bench step` only, not for 'merge'"),
        (
            ["bench", "step", "--surface", "rpyc"],
            "--surface: valid for `vlora bench serve` only, not for 'step'",
        ),
        (
            ["bench", "serve", "--model", "zzz"],
            "names of a model and of adapters require another server; also give its --url",
        ),
        (
            ["bench", "serve", "--url", "localhost:1", "--model", "zzz"],
            "url is 'localhost:1'; write http://HOST:PORT/v1",
        ),
        (["bench", "serve", "--requests", "3", "--duration-s", "3"], "either a number of requests or a duration"),
        (["bench", "costs", "--model", "zzz"], "no model named 'zzz' to measure; choose one of qwen2-0.5b"),
        (
            ["bench", "policy", "--device", "cuda:7"],
            "device 'cuda:7' was requested, but torch finds no CUDA device",
        ),
        (["gpu-check", "--out", "nowhere"], "torch finds no CUDA device; --device cpu runs the stages"),
        (
            ["fuse", "nowhere.yaml"],
            "nowhere.yaml: no such file, and no plan of that name in the package (demo-full, demo, small)",
        ),
        (["fuse", "demo", "--out", "x", "--resume", "--restart"], "give one of them"),
    ],
)
def test_user_errors_are_one_line_and_code_2(
    vlora_command: Vlora, address: str, image: str, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setenv("VLORA_SERVER", address)
    code, out, err = vlora_command(*(image if arg == "IMAGE" else arg for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1, err


def test_a_truncated_video_is_one_line(address: str, video: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(Path(video).read_bytes()[:400])
    command = [sys.executable, "-m", "vlora.cli", "stream", str(broken), *NIGHT, "--server", address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: cannot read video {str(broken)!r}: it is not a video that this machine can decode\n"


def test_several_errors_of_a_plan_have_a_line_each(vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BadPlan("plan.yaml, line 3, field `a`: is missing\nplan.yaml, line 9, field `b`: no such field")

    monkeypatch.setattr("fusion.commands.fuse", refuse)
    code, _, err = vlora_command("fuse", "demo", "--out", "x")
    assert code == 2 and err == (
        "error: plan.yaml, line 3, field `a`: is missing\nerror: plan.yaml, line 9, field `b`: no such field\n"
    )


@pytest.mark.parametrize(
    ("command", "runs"), [(("fuse", "demo", "--out", "x"), "fusion.commands.fuse"), (("demo",), "apps.demo.run")]
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


def test_a_conversion_is_reported_as_text_or_json(vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [ConvertedLayer("q_proj", Blocks("a", 2), 4, 0.25), ConvertedLayer("fc", None, 8, 0.0)]
    conversion = Conversion(layers, [DistillationScores("signs", 0.9, 0.5, 0.8, 0.3, 0.1)])
    monkeypatch.setattr("fusion.block_diagonal.convert.convert", lambda *_, **__: conversion)
    command = ("convert-bd", "signs", "--blocks", "2")
    code, out, err = vlora_command(*command)
    assert (code, err) == (0, "") and "rank 4, error 0.2500" in out and out.endswith("written to signs-bd2\n")
    code, out, err = vlora_command(*command, "--json")
    assert (code, err) == (0, "") and json.loads(out) == {
        "out": "signs-bd2",
        "layers": [
            {"layer": "q_proj", "blocks": ["a", 2], "rank": 4, "error": 0.25},
            {"layer": "fc", "blocks": None, "rank": 8, "error": 0.0},
        ],
        "domains": [conversion.domains[0]._asdict()],
    }


def test_a_models_name_does_not_contain_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen2-vl").mkdir()
    monkeypatch.chdir(tmp_path)
    for model in (f"{tmp_path}/qwen2-vl", f"{tmp_path}/qwen2-vl/", "qwen2-vl", "./qwen2-vl/."):
        assert vlora.cli.serve.served_name(model) == "qwen2-vl"
    for model in ("Qwen/Qwen2-VL-2B-Instruct", "embedded"):
        assert vlora.cli.serve.served_name(model) == model


def test_adapter_folders_are_found_by_name(tmp_path: Path) -> None:
    for name in ("signs", "cam"):
        write_adapter(tmp_path / name)
    (tmp_path / "not-an-adapter").mkdir()
    found = vlora.cli.serve.named_adapters((f"extra={tmp_path}/x=y",), tmp_path)
    assert found == {"cam": str(tmp_path / "cam"), "signs": str(tmp_path / "signs"), "extra": f"{tmp_path}/x=y"}
