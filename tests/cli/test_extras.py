"""The client-only installation: the commands that work without the engine's packages, and the errors of the others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import types
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Running
from vlora.cli.extras import EXTRAS
from vlora.lazy import hidden

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT_MB = 60
"""Bound on the client's installation; the README has the measured size."""


def distributions(requirements: list[str]) -> Iterator[str]:
    """Names of the distributions, with those of the package's own extras."""
    for requirement in requirements:
        if own := re.fullmatch(r"vlora\[(\w+)\]", requirement):
            yield from distributions(PROJECT["optional-dependencies"][own[1]])
        else:
            yield re.split(r"[\[<>=!~; ]", requirement)[0]


def run(extra: str, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Run commands in one process with the packages of an extra."""
    child = [sys.executable, "-m", "tests.cli.without_extras", extra]
    done = subprocess.run(child, cwd=ROOT, input=json.dumps(commands), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


def missing(extra: str, shown: str = r"[-\w]+, [-\w]+, [-\w]+ and \d+ more") -> str:
    return (
        rf"error: packages are missing: {shown}; "
        rf"pip install 'vlora\[{extra}\]', or in a checkout: pip install '\.\[{extra}\]'\n"
    )


def test_commands_check_for_the_packages_that_the_extra_installs() -> None:
    for extra, packages in EXTRAS.items():
        declared = set(distributions(PROJECT["optional-dependencies"][extra]))
        assert set(packages) == declared - {"triton"}
    assert not set(distributions(PROJECT["dependencies"])) & set(EXTRAS["demo"])


HELP = ("", "query", "stream", "batch", "status", "adapters", "adapters load", "simulate", "serve", "fuse")
OTHERS = {
    **dict.fromkeys(("serve", "tune", "convert-lora x --rank 2"), "serve"),
    **dict.fromkeys(("fuse small --out x", "fuse small --check", "convert-bd x --blocks 2"), "fuse"),
    **dict.fromkeys(("model eval", "bench step"), "fuse"),
    "demo": "demo",
}


def test_client_commands_and_help_need_no_extra_and_the_others_name_theirs(server: Running, inputs: Path) -> None:
    (inputs / "vlora.yaml").write_text("simulate: {requests: 20}\n")
    at = ["--server", f"127.0.0.1:{server.port}"]
    image, video = (str(inputs / name) for name in ("a.png", "video.mp4"))
    of_videos = [["stream", video, "--head", "cam/night", *at], ["retrieve", "a car", video, *at]]
    for code, out, err in run("nothing", *([*command.split(), "--help"] for command in HELP)):
        assert code == 0 and out.startswith("Usage: vlora"), err
    query, status, adapters, batch, simulate, *refused = run(
        "nothing",
        ["query", image, "say:light", *at],
        ["status", "--json", *at],
        ["adapters", "--json", *at],
        ["batch", image, "--question", "say:dark", "--json", *at],
        ["--config", str(inputs / "vlora.yaml"), "simulate", "gamma:rate=1,cv=2", "--json"],
        *of_videos,
    )
    assert query == (0, "light\n", "") and status[0] == adapters[0] == batch[0] == simulate[0] == 0
    assert json.loads(status[1])["num_running"] == 0 and json.loads(batch[1])["text"] == "dark"
    assert [json.loads(line)["name"] for line in adapters[1].splitlines()] == ["cam", "signs"]
    assert json.loads(simulate[1])
    for code, out, err in refused:
        assert (code, out) == (2, "") and re.fullmatch(missing("video", "opencv-python-headless, numpy"), err)
    for extra, (code, out, err) in zip(OTHERS.values(), run("nothing", *map(str.split, OTHERS)), strict=True):
        assert (code, out) == (2, "") and re.fullmatch(missing(extra), err), err
    # Streams and retrieval need the extra for videos only.
    of_videos[1] += ["--index", str(inputs / "x.sqlite")]
    *found, (code, out, agents) = run("video", *of_videos, ["mcp"])
    assert (code, out) == (2, "") and re.fullmatch(missing("mcp", "mcp"), agents), agents
    for code, out, err in found:
        assert code == 0 and len(out.splitlines()) == 4, err


def test_several_replicas_need_ray_and_traces_opentelemetry() -> None:
    needing = ("--replicas 2", "--replicas 1:2", "--ray auto")
    *found, (code, out, error) = run("serve", *(["serve", *each.split()] for each in (*needing, "--tracing")))
    for what, one in zip(needing, found, strict=True):
        message = f"error: {what} needs Ray: pip install 'vlora[cluster]'; without it one engine serves\n"
        assert one == (2, "", message)
    shown = "opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http"
    assert (code, out) == (2, "") and re.fullmatch(missing("tracing", shown), error), error


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_client_alone_works_in_a_fresh_environment(tmp_path: Path, address: str, image: str) -> None:
    source = tmp_path / "source"  # pip leaves its build folder next to the sources
    source.mkdir()
    for folder in ("vlora", "atmm", "heads", "fusion", "apps"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    pip = [str(binaries / "pip"), "--disable-pip-version-check"]
    probe = [*pip, "download", "--no-deps", "--dest", str(tmp_path / "probe"), "rpyc"]
    if subprocess.run(probe, capture_output=True, timeout=120).returncode:
        pytest.skip("pip cannot download packages here")
    subprocess.run([*pip, "install", "--quiet", str(source)], check=True, timeout=280)
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True).stdout
    installed = {each["name"].lower() for each in json.loads(listed)}
    assert "vlora" in installed and not installed & set(EXTRAS["demo"]), installed
    code = "from vlora.client import AsyncClient, Client; import sys; assert 'torch' not in sys.modules"
    subprocess.run([str(binaries / "python"), "-c", code], check=True, cwd=tmp_path)
    query = [str(binaries / "vlora"), "query", image, "say:light", "--server", address]
    assert subprocess.run(query, check=True, capture_output=True, text=True, cwd=tmp_path).stdout == "light\n"
    serve = subprocess.run([str(binaries / "vlora"), "serve"], capture_output=True, text=True, cwd=tmp_path)
    assert serve.returncode == 2 and "pip install 'vlora[serve]'" in serve.stderr
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"], check=True)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    size_mb = sum(path.stat().st_blocks * 512 for path in packages.rglob("*") if path.is_file()) / 2**20
    assert size_mb < CLIENT_MB, f"{size_mb:.0f} MiB"


@pytest.mark.slow
def test_the_server_imports_nothing_of_the_other_extras() -> None:
    """`vlora serve`, its engine process, `vlora tune` and the packaged model, without the packages of `fuse` alone."""
    code = (
        "from tests.cli.without_extras import hide\n"
        "from vlora.cli.extras import EXTRAS\n"
        "hide({'matplotlib', *EXTRAS['demo'].values()} - set(EXTRAS['serve'].values()))\n"
        "import fusion.embedded, vlora.engine.ipc.worker, vlora.engine.engine, vlora.models.runner\n"
        "import vlora.models.processing, vlora.tune\n"
        "import vlora.server.launch, vlora.server.http.routes, vlora.server.http.server, vlora.server.metrics\n"
        "try:\n    import peft\nexcept ImportError:\n    print('hidden')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "hidden\n", done.stderr


def test_a_hidden_package_that_was_imported_nevertheless_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hidden_1")
    monkeypatch.setitem(sys.modules, "hidden_1", module)  # restores its absence
    del sys.modules["hidden_1"]
    with hidden("hidden_1", "hidden_2"):
        sys.modules["hidden_1"] = module
    assert sys.modules["hidden_1"] is module and "hidden_2" not in sys.modules


def test_a_front_end_loads_its_tokenizer_and_image_processor_without_torch() -> None:
    code = (
        "import sys\n"
        "import vlora.server.http.routes, vlora.server.http.server\n"
        "from vlora.cli.options import EMBEDDED, model_path\n"
        "from vlora.server.launch import _load_processor\n"
        "processor = _load_processor(model_path(EMBEDDED))\n"
        "print(processor.decode(processor.encode('what is shown ?').prompt_ids), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "what is shown ? False\n" and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "light", "shown"),
    [
        ("query {image} say:light --server {address}", {"rpyc"}, "light\n"),
        ("--help", set(), "Usage: vlora"),
        ("query --help", set(), "Usage: vlora query"),
        ("fuse {plan} --check", set(), "error: {plan}, line 1, field `domians`: is not a known field"),
        ("fuse {plan} --out out", set(), "error: {plan}, line 1, field `domians`: is not a known field"),
        (
            "fuse {data} --check",
            {"numpy", "cv2"},
            "error: {data}, line 1, field `domains[0].data.path`: {table}",
        ),
        ("fuse {data} --out {out}", {"numpy", "cv2"}, "error: {data}, line 1, field `domains[0].data.path`: {table}"),
        ("fuse {data} --out {out} --dry-run", {"numpy", "cv2"}, "error: {data}, line 1, field `domains[0].data.path`"),
    ],
)
def test_queries_help_and_errors_in_a_plan_or_its_data_load_nothing_heavy(
    address: str, image: str, tmp_path: Path, command: str, light: set[str], shown: str
) -> None:
    (plan := tmp_path / "plan.yaml").write_text(
        "domians: []\ndomains: [{name: a, source: lfw-faces, question: what, threshold: 0.5}]\n"
    )
    (table := tmp_path / "table.csv").write_text("image,answer\nmissing.png,cat\n")
    (data := tmp_path / "data.yaml").write_text(
        f"domains: [{{name: a, question: what, threshold: 0.5, data: {{format: questions, path: {table}}}}}]\n"
    )
    files = {"plan": plan, "table": table, "data": data, "out": tmp_path / "out"}
    names = {"address": address, "image": image, **files}
    heavy = {"torch", "numpy", "transformers", "cv2", "zmq", "scipy", "rpyc", "fastapi"} - light
    tops = ("vlora", "fusion", "apps", "heads", "atmm")
    code = (
        f"import sys, vlora.cli; sys.argv = ['vlora', *{command.format(**names).split()}]\n"
        "try: vlora.cli.main()\n"
        "except SystemExit: pass\n"
        f"heavy = {heavy} & set(sys.modules); assert not heavy, heavy\n"
        f"own = [name for name in sys.modules if name.partition('.')[0] in {tops}]\n"
        "assert len(own) <= 100, own"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (done.stdout + done.stderr).startswith(shown.format(**names)), done.stderr
