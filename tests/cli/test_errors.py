"""User errors of all commands: one line that names the value, exit code 2, and nothing on stdout."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

import vlora.cli.query
from tests.cli.conftest import Vlora
from tests.server.running import png
from tests.sites import Page, site
from vlora.cli import cli
from vlora.errors import BadPlan

PAGES = {
    "/a.png": Page(png(250)),
    "/typeless": Page(png(250), "application/octet-stream"),
    "/page": Page(b"<html>", "text/html"),
    "/large.png": Page(bytes(2000)),
}


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    with site(lambda path: PAGES.get(path, Page(status=404))) as found:
        yield found.url("")


CAMERA = """
cameras:
- name: gate
  source: video.mp4
  tasks:
  - {head: cam/noon, rate: 2}
""".lstrip()
TRAINING = "folder: out\ntrainings:\n- name: signs\n  data: d.jsonl\n  steps: 2"
LEARNING = "folder: out\nadapters:\n- name: signs"
GOOD = {"question": "what ?", "answer": "a sign"}
FILES = {
    "d.jsonl": json.dumps(GOOD),
    "no-answer.jsonl": '{"question": "what ?"}',
    "no-folder.yaml": TRAINING.removeprefix("folder: out\n"),
    "no-steps.yaml": TRAINING.replace("2", "0"),
    "no-answer.yaml": TRAINING.replace("d.jsonl", "no-answer.jsonl"),
    "no-adapter.yaml": "folder: out\nadapters: []",
    "no-records.yaml": LEARNING + "\n  training: {steps: 2}\n  trusted: absent.jsonl",
    "camera.yaml": CAMERA,
    "rates.yaml": CAMERA.replace("rate:", "rates:"),
    "no.mp4": "no video",
    "text.sqlite": "text",
    "no-journal": "no journal",
}
CONFIGS = {
    "srve: {port: 1}": "unknown command 'srve'; did you mean 'serve'?",
    "serve: {rpyc_port: 1}": "serve: unknown option 'rpyc_port'; did you mean 'rpyc-port'?",
    "model: {eval: {quik: true}}": "model, eval: unknown option 'quik'; did you mean 'quick'?",
    "serve: [1]": "serve: write options and their values, such as 'http-port: 8000'",
    "just words": "contains no options; write",
    "serve: {": "is not YAML: line 1: a bracket that is not closed",
    "serve: {theta-s: many}": "invalid value for '--theta-s'",
    "serve: {theta-s: [1, 2]}": "serve: theta-s is [1, 2]; write one value",
    "serve: {weight: [{signs: 2}]}": "serve: weight is [{'signs': 2}]; write a value, or a list of them",
    "serve: {weight: [null]}": "serve: weight is [None]; write a value, or a list of them",
}

QUERY, CAM_DAY = "query a.png say:x", "stream a.png --adapter cam --head day"
LONG, INDEX = "x" * 256, "index videos --out x.sqlite"
SEARCH, CHECK = "retrieve 'a car' --index x.sqlite", "check embedded --device"
SERVE, BASE = "serve --rpyc-port 0", "base serve --bind 127.0.0.1:0"
SERVE_BASE, TRAIN, LEARN = f"{SERVE} --serve-base", f"{SERVE} --train", f"{SERVE} --learn"
ONE_ENGINE = "this server has one engine; start it with --replicas 2 or more to have replicas"
SIMULATE = "simulate gamma"

# A command in the folder of inputs, and a part of its error.
ERRORS = {
    # Arguments of click.
    "query": "missing argument 'IMAGE... [QUESTION]'; see 'vlora query --help'",
    "nonsense": "no such command 'nonsense'; see 'vlora --help'",
    f"{QUERY} --nonsense": "no such option",
    f"{QUERY} --max-tokens many": "invalid value for '--max-tokens'",
    "status --wait-s soon": "invalid value for '--wait-s': 'soon' is not a valid float range; see 'vlora sta",
    f"{CAM_DAY} --fps 0": "invalid value for '--fps'",
    "serve --load-format zzz": "invalid value for '--load-format'",
    "serve --policy quick": "invalid value for '--policy': 'quick' is not one of 'cost_based', 'algorithm1'",
    "serve --dtype quick": "invalid value for '--dtype': 'quick' is not one of 'auto', 'float32'",
    f"{SIMULATE} --rule random": "'random' is not one of 'placed', 'punica'",
    f"{SIMULATE} --over 0.5": "over is 0.5; it must be at least 1",
    # The server's address.
    f"{QUERY} --server zzz": "--server is 'zzz'; write HOST:PORT",
    "status --server 127.0.0.1:99999": "--server is '127.0.0.1:99999'; write HOST:PORT, with a port from 1 to 65535",
    "status --server a..b:1": "cannot reach a server at a..b:1",
    "status --server 127.0.0.1:1 --wait-s 0.1": "cannot reach a server at 127.0.0.1:1",
    f"{QUERY} --server 127.0.0.1:1": "cannot reach a server at 127.0.0.1:1: ",
    "adapters --server 127.0.0.1:1 unload signs": "write --server after 'unload'",
    "adapters --tls-cert x.pem": "--tls-cert requires TLS; also give --tls-ca",
    "adapters --tls-ca nowhere.pem": "--tls-key cannot be used ('nowhere.pem'): ",
    # Questions.
    f"{QUERY} --max-tokens 0": "max_tokens is 0; it must be at least 1",
    "query a.png ' '": "the prompt has images but no text, and the base model has no default question",
    "query a.png bright.png": "the base model has no default question",
    "query nowhere.png say:x": "cannot read image 'nowhere.png': No such file or directory",
    "query no.mp4 say:x": "image 1 (",
    f"{QUERY} --adapter zzz": "no adapter named 'zzz'; registered: cam, signs",
    "query a.png --head day": "--head is 'day'; also give its --adapter",
    "query a.png --head day -a cam --max-tokens 8": "--max-tokens has no effect on a task head's answer; leave out --",
    "query a.png --head day -a cam --answer words": "leave out --answer or --head",
    "query a.png what? --answer head": "answer is 'head', but the base model has no heads",
    "batch a.png --head day -a cam --answer words": "leave out --answer or --head",
    "query a.png What? --head day -a cam": "cannot read image 'What?': No such file",
    "query a.png --head night -a cam": "head 'night' of adapter 'cam' reads 2 images",
    "query a.png --head zzz -a cam": "adapter 'cam' has no head 'zzz'; its heads: ",
    "query SITE/none.png": "the picture cannot be fetched from '127.0.0.1': status 404",
    "query SITE/page": "'127.0.0.1' sent 'text/html'; an image is expected",
    "query SITE/large.png": "the picture from '127.0.0.1' has over 1000 bytes; send a smaller one",
    "query SILENT": "cannot be fetched from '127.0.0.1': no answer within 0.2 s",
    "query http://127.0.0.1:1/a.png": "the picture cannot be fetched from '127.0.0.1': Connection refused",
    "query 'http://[/a.png'": "the picture cannot be fetched from 'http://[/a.png'; check the URL",
    "batch a.png": "give a question, or a head and the adapter it belongs to",
    f"batch {LONG}": "cannot read 'xxx",
    # Adapters and trainings of a server.
    **{f"adapters {each} absent": "no adapter named 'absent'" for each in ("unload", "pin", "unpin")},
    "adapters load signs nothing": "nothing: no adapter_config.json",
    **{f"cluster {each}": ONE_ENGINE for each in ("status", "status --adapters", "drain a", "resume a", "scale 2")},
    "train cancel absent": "no training named 'absent' is running; running: none",
    "train submit bad": "bad: cannot be read: No such file or directory",
    # Streams.
    "stream nowhere.mp4 --head cam/day": "cannot read video 'nowhere.mp4': no such",
    "stream no.mp4 --head cam/day": "it is not a video that this machine can decode",
    "stream a.png --adapter zzz --head night": "no adapter named 'zzz'; registered: cam, signs",
    "stream a.png --adapter cam --head zzz": "adapter 'cam' has no head 'zzz'; its heads: night, day",
    f"{CAM_DAY} --head day": "--head 'day' is given more than once",
    f"{CAM_DAY} --head cam/day": "head 'day' of adapter 'cam' is given more than once; give it once",
    "stream a.png --head day": "--head is 'day'; also give its --adapter, or write ADAPTER/HEAD",
    "stream a.png --adapter cam": "nothing is asked; give at least one --head or --question",
    "stream a.png --adapter zzz --question say:x": "no adapter named 'zzz'",
    f"{CAM_DAY} --fps nan": "--fps is nan; it must be a number",
    f"{CAM_DAY} --check": "--check is for a plan; give a .yaml file, or remove --check",
    "stream camera.yaml --head cam/day": "--head is for sources without a plan; write it into the plan",
    "stream camera.yaml --max-tokens 5": "--max-tokens is for sources without a plan; write it into the plan",
    "stream camera.yaml 0": "a plan has its own cameras; give one plan and no other source",
    "stream camera.yaml": "line 5, field `cameras[0].tasks[0].head`: adapter 'cam' has no head 'noon'; its heads: nig",
    "stream rates.yaml --check": "line 5, field `cameras[0].tasks[0].rates`: is not a known field; check its spelling",
    "summarize videos --part-s nan": "--part-s is nan; it must be a number, at least 0.1",
    # Indexes.
    "retrieve ' ' --index x.sqlite": "the query is empty",
    "retrieve 'a car' --index y.sqlite": "no index",
    f"{SEARCH} --adapter zzz": "'zzz'",
    f"{SEARCH} --question 'is it?'": "write {} once",
    f"{SEARCH} --sheet a.jpg": "ends in .png",
    f"{SEARCH} videos --sheet no/a.png": "its folder does not exist",
    f"{SEARCH} empty": "contains no video and no picture",
    f"retrieve 'a car' videos --index {LONG}": "cannot read index 'xxx",
    "index no.mp4 --out x.sqlite": "cannot read video",
    f"{INDEX} --frames 2": "was made with --frames 1, not 2",
    f"{INDEX} --question what?": "--question describe the image., not what?",
    "index videos --out z.sqlite --adapter zzz": "'zzz'",
    "index videos --out no/z.sqlite": "-lock cannot be created: No such file",
    "index videos --out z.sqlite --fps inf": "--fps is inf",
    "index videos -a cam -a cam": "--adapter 'cam' is given more than once; give it once",
    # Settings of a server.
    "serve --adapter cam": "--adapter is 'cam'; write NAME=PATH",
    "serve --adapter a=x --adapter a=y": "adapter 'a' is given twice: ",
    "serve --adapter a=x --served-model-name a": "adapter 'a' has the base model's name; rename it",
    "serve --adapters nowhere": "nowhere: contains no folder with an adapter_config.json",
    "serve --max-batch-size 0": "max_batch_size is 0; it must be at least 1",
    "serve --max-images 257": "max_images is 257; it must be at most 256",
    "serve --theta-s nan": "theta_s is nan; it must be above 0",
    **{
        f"serve --image-hosts '{host}'": f"image_hosts is '{host}', which"
        for host in ("https://pictures.example", "pictures.example:8080", "*.example")
    },
    "serve --token-file nowhere.yaml": "cannot read the token file 'nowhere.yaml'",
    "serve --tls-key x.pem": "tls_cert and tls_key must be set together",
    "serve --host 0.0.0.0": "host is '0.0.0.0'; without authentication",
    "serve --model ./nowhere": "--model is './nowhere'; there is no such folder",
    "serve --train-slowdown 0.9": "train_slowdown is 0.9; it must be above 1",
    "serve --replicas 0": "--replicas is 0; at least one engine serves",
    "serve --replicas 3:2": "--replicas is 3:2; at least one engine serves, and LEAST:MOST is ascending",
    "serve --replicas 1:2:3": "--replicas is '1:2:3'; write a number, or LEAST:MOST to scale by load",
    "serve --scale-up-s nan": "--scale-up-s is nan; it must be above 0",
    "serve --scale-down-s nan": "--scale-down-s is nan; it must be above 0",
    "serve --routing-journal x": "--routing-journal needs --replicas 2 or more, or --ray: one engine has no router",
    "serve --placement pack": "--placement needs --replicas 2 or more, or --ray: one engine has no node of Ray",
    "serve --ray auto --train t.yaml": "--train t.yaml needs --replicas 1 (now --ray auto): one engine trains; serve",
    "serve --replicas 2 --replica-resource a": "--replica-resource is 'a'; write NAME=VALUE",
    "serve --replicas 2 --replica-resource a=b": "--replica-resource a=b: 'b' is no number",
    "serve --replicas 2 --replica-resource GPU=1": "custom resources above 0 only; see --replica-cpus,",
    "serve --replicas 2 --replica-label zone": "--replica-label is 'zone'; write NAME=VALUE",
    "serve --replicas 2 --replica-cpus -1": "--replica-cpus is -1.0; it must be at least 0",
    "serve --replicas 2 --ray-namespace ''": "--ray-namespace is empty; give the name of this service",
    "serve --replicas 2 --ray-wait-s 0": "--ray-wait-s is 0.0; it must be above 0",
    "serve --replicas 2 --runtime-env none.yaml": "--runtime-env none.yaml: the file cannot be read: ",
    "serve --replicas 2 --runtime-env '{'": "--runtime-env {: neither JSON nor a file with YAML: ",
    "serve --replicas 2 --runtime-env '{env_vars: 1}'": "write fields of a runtime environment of Ray",
    "serve --replicas 2 --shipped-gib 0": "--shipped-gib is 0.0; it must be above 0",
    "serve --replicas 2 --train t.yaml": "--train t.yaml needs --replicas 1 (now 2): one engine trains; serve it separ",
    # The base model for split clients.
    "base serve --bind 0.0.0.0:0": "without authentication a base model is served on loopback only",
    "base serve --bind nowhere": "write HOST:PORT or unix:PATH",
    f"{BASE} --shard 3/2": "--shard is '3/2'; write I/N",
    f"{BASE} --tls-cert a.pem": "tls_cert and tls_key must be set together",
    f"{BASE} --device abacus": "use cpu, cuda or cuda:N",
    f"{BASE} --token-file /nowhere": "cannot read the token file",
    f"{BASE} /nowhere": "MODEL is '/nowhere'; there is no such folder",
    f"{SERVE_BASE} nowhere": "address 'nowhere' is not valid; write HOST:PORT or unix:PATH",
    f"{SERVE_BASE} 0.0.0.0:4711": "without authentication a base model is served on loopback only",
    f"{SERVE_BASE} unix:a.sock --replicas 2": "--serve-base unix:a.sock needs --replicas 1 (now 2): one engine listens",
    f"{SERVE_BASE} unix:a.sock --switching in_place": "serve_base needs W0 in memory while an adapter is merged",
    f"{SERVE_BASE} unix:a.sock --quantize int8": "quantize none, not int8",
    # Plans of trainings and of learning.
    f"{TRAIN} no-folder.yaml": "no-folder.yaml, line 1, field `folder`: is missing",
    f"{TRAIN} no-steps.yaml": "no-steps.yaml, line 5, field `trainings[0].steps`:",
    f"{TRAIN} no-answer.yaml": "no-answer.jsonl, line 1: `answer` is null; it must be text",
    f"{LEARN} no-adapter.yaml": "no-adapter.yaml, line 2, field `adapters`:",
    f"{LEARN} no-records.yaml": "line 5, field `adapters[0].trusted`: FOLDER/absent.jsonl cannot be read: No such file",
    # Other commands.
    f"{SIMULATE} --replicas 4 --max-replicas 2": "max_replicas is 2; it must be at least replicas, 4",
    f"{SIMULATE} --quick --policy dlora": "leave --policy dlora out",
    f"{SIMULATE} --replay no-journal": "--replay repeats no-journal; leave the TRACE 'gamma' out",
    "simulate": "vlora simulate needs a TRACE, a CSV file or a workload, or --replay FILE",
    "simulate --replay no-journal": "no-journal: line 1 is no line of a record of routing: ",
    "bench zzz": "no bench named 'zzz'; choose one of ",
    "bench memory --quick --out /proc/x": "--out: the folder '/proc/x' cannot be created: ",
    "bench step --model llava-13b": "--model is valid for `vlora bench costs` and `serve` only",
    "bench merge --quantize int8": "--quantize is valid for `vlora bench step` only, not for 'merge'",
    "bench step --surface rpyc": "--surface is valid for `vlora bench serve` only, not for 'step'",
    "bench serve --model zzz": "names of a model and of adapters require another server; also give its --url",
    "bench serve --url localhost:1 --model zzz": "url is 'localhost:1'; write http://HOST:PORT/v1",
    "bench costs --model zzz": "no model named 'zzz' to measure; choose one of qwen2-0.5b",
    "fuse nowhere.yaml": "nowhere.yaml: no such file, and no plan of that name in the package (demo-full, demo, small)",
    "fuse demo --out x --resume --restart": "give one of them",
    "fuse demo --check --serve-to 127.0.0.1:1": "cannot reach a server at 127.0.0.1:1",
    "fuse demo --out x --dry-run --serve-to 127.0.0.1:1": "cannot reach a server at 127.0.0.1:1",
    "fuse demo --out x --dry-run --restart": "--check estimates a run from nothing",
    "demo --full --plan mine.yaml": "give --full or --plan, not both",
    f"{CHECK} tpu --memory-gib 3": "device 'tpu' is not ",
    "check /none": "there is no such folder",
    **{f"tune {each}": each.split()[0] for each in ("--minutes -1", "--threads 0", "--dtype int8", "--device tpu")},
    "tune --minutes 0 --out text.sqlite/here.json": "cannot write 'text.sqlite/here.json': File exists",
    "tune --check --out none.json": "cannot read the table none.json",
    "tune --check --out no.mp4": "cannot read the table no.mp4",
}
if not torch.cuda.is_available():
    ERRORS |= {
        "bench costs --device cuda:7": "device 'cuda:7' was requested, but torch finds no CUDA device",
        "gpu-check --out nowhere": "torch finds no CUDA device; --device cpu runs the stages",
        f"{CHECK} cuda": "device 'cuda' was requested, but torch finds no CUDA device; to check for another machine, g",
        "tune --device cuda": "no CUDA device",
    }


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"


@pytest.mark.parametrize("command", ERRORS)
def test_user_errors_are_one_line_and_code_2(
    asking: Vlora, inputs: Path, pages: str, silent: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(vlora.cli.query, "MAX_BYTES", 1000)
    monkeypatch.setattr(vlora.cli.query, "TIMEOUT_S", 0.2)
    for name, text in FILES.items():
        (inputs / name).write_text(text + "\n")
    if ".sqlite" in command:
        (inputs / "empty").mkdir()
        assert asking(*INDEX.split())[0] == 0
    words = [word.replace("SITE", pages).replace("SILENT", silent) for word in shlex.split(command)]
    assert ERRORS[command].replace("FOLDER", str(inputs)) in asking.refusal(*words)


def paths_of(group: click.Group, *words: str) -> Iterator[list[str]]:
    """For each argument and path of the commands, a command line in which it is empty."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from paths_of(command, *words, name)
            continue
        for each in command.params:
            if isinstance(each, click.Argument) or isinstance(each.type, click.Path):
                yield [*words, name, *([] if isinstance(each, click.Argument) else each.opts[:1]), ""]


def test_no_command_takes_an_empty_path_for_the_current_folder(vlora_command: Vlora) -> None:
    lines = [*paths_of(cli), ["query", "a-sign.png", ""], ["retrieve", "a sign", ""]]
    assert len(lines) > 40
    for words in lines:
        assert ": it is empty; see 'vlora " in vlora_command.refusal(*words), words


@pytest.mark.parametrize("text", CONFIGS)
def test_an_error_in_the_config_file_is_one_line(vlora_command: Vlora, tmp_path: Path, text: str) -> None:
    (tmp_path / "vlora.yaml").write_text(text)
    assert CONFIGS[text] in vlora_command.refusal("--config", tmp_path / "vlora.yaml", "serve", "--adapter", "x")


def test_an_invalid_value_is_reported_with_its_source(
    vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = "invalid value for '--wait-s': 'soon' is not a valid float range (from the {}); see 'vlora status --help'"
    (tmp_path / "vlora.yaml").write_text("status:\n  wait-s: soon\n")
    command = ("--config", tmp_path / "vlora.yaml", "status")
    assert vlora_command.refusal(*command) == bad.format("config file")
    monkeypatch.setenv("VLORA_STATUS_WAIT_S", "soon")
    assert vlora_command.refusal(*command) == bad.format("environment, VLORA_STATUS_WAIT_S")


def test_several_errors_of_a_plan_have_a_line_each(vlora_command: Vlora, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BadPlan("plan.yaml, line 3, field `a`: is missing\nplan.yaml, line 9, field `b`: no such field")

    monkeypatch.setattr("fusion.run.fuse", refuse)
    error = "error: plan.yaml, line 3, field `a`: is missing\nerror: plan.yaml, line 9, field `b`: no such field\n"
    assert vlora_command("fuse", "demo", "--out", "x") == (2, "", error)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="for systems with a disk that is always full")
def test_a_full_disk_is_a_failure(asking: Vlora, inputs: Path) -> None:
    error = "error: cannot write '/dev/full': No space left on device\n"
    assert asking("batch", "a.png", "-q", "say:x", "--out", "/dev/full") == (1, "", error)


def test_a_dead_engine_and_a_failed_step_are_failures(asking: Vlora, inputs: Path) -> None:
    assert asking("query", "a.png", "fail") == (1, "", "error: the script says fail\n")


def test_a_picture_by_url_is_fetched(asking: Vlora, inputs: Path, pages: str) -> None:
    for address in (f"{pages}/a.png", f"{pages}/typeless", f"{pages.replace('http', 'HTTP')}/a.png"):
        assert asking.out("query", address, "--adapter", "cam", "--head", "day") == "bright  98.0%\n"
    assert asking.out("query", f"{pages}/a.png", "bright.png", "say:x") == "x\n"
