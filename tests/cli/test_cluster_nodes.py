"""`vlora cluster up`, `join`, `down` and `vlora serve --cluster` with invalid input: one line, exit code 2. No Ray."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Vlora
from vlora.cli.cluster_nodes import visible_gpus

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

PLAN = "head: 127.0.0.1:1\ntoken_file: token\nmodel: {model}\nadapters: {adapters}\nreplicas: {{number: {number}}}\n"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of other tests are not seen, and no folder of a run is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("vlora-ray-*"))


def plan(tmp_path: Path, model: str = ".", adapters: str = "{}", number: int = 2) -> str:
    (file := tmp_path / "cluster.yaml").write_text(PLAN.format(model=model, adapters=adapters, number=number))
    return str(file)


def token(tmp_path: Path) -> str:
    (file := tmp_path / "token").write_text("t" * 32)
    file.chmod(0o600)
    return str(file)


def refused(result: tuple[int, str, str]) -> str:
    """The message of the only line."""
    code, out, error = result
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1, result
    return error.removeprefix("error: ").strip()


def test_a_number_of_no_replicas_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = plan(tmp_path, number=0)
    for args in (("cluster", "up", file), ("serve", "--cluster", file)):
        assert refused(vlora_command(*args)) == f"{file}, line 5, field `replicas.number`: is 0; it must be at least 1"


def test_a_missing_plan_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml")
    assert refused(vlora_command("cluster", "up", file)) == f"{file}: cannot be read: No such file or directory"


def test_a_missing_model_or_adapter_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = plan(tmp_path, model="./none")
    message = f"{file}: `model` is './none'; there is no such folder"
    assert refused(vlora_command("cluster", "up", file)) == message
    assert refused(vlora_command("serve", "--cluster", file)) == message
    file = plan(tmp_path, adapters="{signs: signs}")
    message = f"adapter 'signs' of the plan: {tmp_path / 'signs'} has no adapter_config.json"
    assert refused(vlora_command("cluster", "up", file)) == message
    assert not (tmp_path / "token").exists()


def test_a_head_on_an_unusable_address_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    token(tmp_path)
    args = ("cluster", "up", plan(tmp_path), "--host", "192.0.2.1")  # for documentation only
    assert refused(vlora_command(*args)).startswith("the head cannot listen at 192.0.2.1:1: ")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "the head's address is '10.0.0.1'; write HOST:PORT, with a port from 1 to 65535"),
        ("127.0.0.1:1", "no connection to a head of a cluster at 127.0.0.1:1: "),
    ],
)
def test_a_wrong_address_is_refused(address: str, message: str, vlora_command: Vlora, tmp_path: Path) -> None:
    args = ("cluster", "join", address, "--token-file", token(tmp_path))
    assert refused(vlora_command(*args)).startswith(message)


def test_a_token_file_that_others_may_read_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = Path(token(tmp_path))
    file.chmod(0o644)
    args = ("cluster", "join", "127.0.0.1:1", "--token-file", str(file))
    assert refused(vlora_command(*args)).startswith(f"the token file {str(file)!r} has mode 0644, so others may use it")


@pytest.mark.parametrize(
    "option", [("--replicas", "2"), ("--model", "m"), ("--adapter", "a=b"), ("--train", "t"), ("--max-replicas", "3")]
)
def test_options_that_the_plan_replaces_are_refused(
    option: tuple[str, str], vlora_command: Vlora, tmp_path: Path
) -> None:
    file = plan(tmp_path)
    message = f"--cluster and {option[0]} are given; the plan {file} decides that, so omit the option"
    assert refused(vlora_command("serve", "--cluster", file, *option)) == message


def test_down_without_a_cluster_ends_nothing(vlora_command: Vlora) -> None:
    assert vlora_command("cluster", "down") == (0, "nothing of a cluster runs on this machine\n", "")


def test_gpus_that_the_process_may_use_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == 2
    for chosen, number in (("", 0), ("-1", 0), ("1", 1), ("GPU-a,GPU-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == number
