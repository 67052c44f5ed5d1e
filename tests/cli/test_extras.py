"""The client-only installation: the commands that work without the engine's packages, and the errors of the others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_cli import video  # noqa: F401  (a fixture)
from vlora.cli.extras import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT_MB = 60
"""Bound on the client's installation; the README has the measured size."""


def distributions(requirements: list[str]) -> Iterator[str]:
    """Names of the distributions, with those of the package's own extras."""
    for requirement in requirements:
        own = re.fullmatch(r"vlora\[(\w+)\]", requirement)
        if own:
            yield from distributions(PROJECT["optional-dependencies"][own[1]])
        else:
            yield re.split(r"[\[<>=!~; ]", requirement)[0]


def run(*arguments: str, extra: str = "nothing") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cli.without_extras", extra, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("extra", EXTRAS)
def test_commands_check_for_the_packages_that_the_extra_installs(extra: str) -> None:
    declared = set(distributions(PROJECT["optional-dependencies"][extra]))
    assert set(EXTRAS[extra]) == declared - {"triton"}


def test_several_replicas_need_ray_and_one_needs_an_engine() -> None:
    done = run("serve", "--replicas", "2", extra="serve")
    message = "error: --replicas 2 needs Ray: pip install 'vlora[cluster]'; without it one engine serves\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    for number in ("0", "-1"):
        done = run("serve", "--replicas", number, extra="serve")
        message = f"error: --replicas is {number}; at least one engine serves\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    for args, message in (
        (("--max-replicas", "2"), "--replicas 2 needs Ray: pip install 'vlora[cluster]'; without it one engine serves"),
        (("--replicas", "3", "--max-replicas", "2"), "--max-replicas is 2, below --replicas 3; set it to 3 or more"),
        (("--replicas", "2", "--autoscale"), "--autoscale needs a --max-replicas above --replicas 2"),
        (("--scale-up-s", "nan"), "--scale-up-s is nan; set a number of seconds above 0"),
        (("--scale-down-s", "nan"), "--scale-down-s is nan; set a number of seconds above 0"),
        (("--ship-adapters",), "--ship-adapters needs --cluster: replicas of one machine read the same files"),
        (("--routing-journal", "x"), "--routing-journal needs --replicas 2 or more: one engine has no router"),
    ):
        done = run("serve", *args, extra="serve")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    done = run("serve", "--replicas", "2", "--train", "plan.yaml", extra="serve")
    message = "error: --train plan.yaml needs --replicas 1 (now 2): one engine trains; serve it separately\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_several_machines_need_ray() -> None:
    for command in (
        "cluster up plan.yaml",
        "cluster join h:1 --token-file t",
        "cluster down",
        "serve --cluster plan.yaml",
    ):
        done = run(*command.split(), extra="serve")
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: packages are missing: ray"), done.stderr
        assert "pip install 'vlora[cluster]'" in done.stderr


def test_the_client_depends_on_no_package_of_the_engine() -> None:
    assert not set(distributions(PROJECT["dependencies"])) & set(EXTRAS["demo"])


@pytest.mark.parametrize(
    "command", ["", "query", "stream", "batch", "status", "adapters", "adapters load", "simulate", "serve", "fuse"]
)
def test_help_needs_no_extra(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0 and done.stdout.startswith("Usage: vlora"), done.stderr


@pytest.mark.slow
def test_client_commands_need_no_extra(address: str, image: str, tmp_path: Path) -> None:
    query = run("query", image, "say:light", "--server", address)
    assert (query.returncode, query.stdout) == (0, "light\n"), query.stderr
    status = run("status", "--json", "--server", address)
    assert json.loads(status.stdout)["num_running"] == 0, status.stderr
    adapters = run("adapters", "--json", "--server", address)
    assert [json.loads(line)["name"] for line in adapters.stdout.splitlines()] == ["cam", "signs"], adapters.stderr
    batch = run("batch", image, "--question", "say:dark", "--json", "--server", address)
    assert json.loads(batch.stdout)["text"] == "dark", batch.stderr
    config = tmp_path / "vlora.yaml"
    config.write_text("simulate: {requests: 20}\n")
    simulate = run("--config", str(config), "simulate", "gamma:rate=1,cv=2", "--json")
    assert simulate.returncode == 0 and json.loads(simulate.stdout), simulate.stderr


def test_streams_of_videos_need_the_extra_for_videos_only(address: str, video: str) -> None:  # noqa: F811
    flags = ("--adapter", "cam", "--head", "night", "--server", address)
    done = run("stream", video, *flags, extra="video")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
    without = run("stream", video, *flags)
    assert without.returncode == 2 and without.stdout == ""
    assert without.stderr == (
        "error: packages are missing: opencv-python-headless, numpy; "
        "pip install 'vlora[video]', or in a checkout: pip install '.[video]'\n"
    )


def test_retrieval_needs_the_extra_for_videos_only(address: str, video: str, tmp_path: Path) -> None:  # noqa: F811
    flags = ("--index", str(tmp_path / "x.sqlite"), "--server", address)
    done = run("retrieve", "a car", video, *flags, extra="video")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
    without = run("retrieve", "a car", video, *flags)
    assert without.returncode == 2 and "pip install 'vlora[video]'" in without.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("serve", "serve"),
        ("tune", "serve"),
        ("fuse small --out x", "fuse"),
        ("fuse small --check", "fuse"),
        ("convert-bd x --blocks 2", "fuse"),
        ("convert-lora x --rank 2", "serve"),
        ("demo", "demo"),
        ("model eval", "fuse"),
        ("bench step", "fuse"),
    ],
)
def test_other_commands_name_the_extra_in_one_line(arguments: str, extra: str) -> None:
    done = run(*arguments.split())
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert re.fullmatch(
        r"error: packages are missing: [-\w]+, [-\w]+, [-\w]+ and \d+ more; "
        rf"pip install 'vlora\[{extra}\]', or in a checkout: pip install '\.\[{extra}\]'\n",
        done.stderr,
    )


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
    probe = subprocess.run(
        [*pip, "download", "--no-deps", "--dest", str(tmp_path / "probe"), "rpyc"], capture_output=True, timeout=120
    )
    if probe.returncode:
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
    """`vlora serve`, its engine process, `vlora tune` and the packaged model, without the packages that only `fuse`
    installs.
    """
    code = (
        "from tests.cli.without_extras import hide\n"
        "from vlora.cli.extras import EXTRAS\n"
        "hide({'matplotlib', *EXTRAS['demo'].values()} - set(EXTRAS['serve'].values()))\n"
        "import fusion.embedded, vlora.engine.ipc.worker, vlora.engine.engine, vlora.models.runner\n"
        "import vlora.models.processing\n"
        "import vlora.server.launch, vlora.server.http.routes, vlora.server.http.server, vlora.server.metrics\n"
        "import vlora.tune\n"
        "try:\n    import peft\nexcept ImportError:\n    print('hidden')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "hidden\n", done.stderr
