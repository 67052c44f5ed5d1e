"""Plans of clusters, checks before a machine joins one, and the runs that `vlora cluster down` finds. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import importlib.metadata
import importlib.util
import os
import re
import signal
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from vlora.cluster.nodes import runs
from vlora.cluster.nodes.certificates import Authority, utc_now
from vlora.cluster.nodes.content import adapter_digest, model_digest
from vlora.cluster.nodes.head import facts_of
from vlora.cluster.nodes.join import (
    Adapter,
    Admitted,
    Facts,
    HeadListener,
    ask_head,
    check_clock,
    check_content,
    check_versions,
    python_version,
)
from vlora.cluster.nodes.node import Machine, Membership
from vlora.cluster.nodes.plan import absolute_adapters, read_cluster_plan
from vlora.cluster.nodes.token import create_token, derived, read_token
from vlora.cluster.on_ray.settings import Folder, Resources
from vlora.errors import BadConfig, BadPlan, Disconnected, Unauthorized, VLoraError
from vlora.wire.address import Address
from vlora.wire.tls import Certificate

PLAN = """\
head: 10.0.0.1:18870
token_file: token
ray_ports: 21000-21199
door_ports: 21200-21299
model: embedded
adapters: {signs: adapters/signs}
replicas: {number: 2, most: 4, cpus: 8, gpus: 1, memory_gib: 16.5}
"""


def written(tmp_path: Path, text: str) -> Path:
    (file := tmp_path / "cluster.yaml").write_text(text)
    return file


def test_a_plan_is_read_with_paths_relative_to_its_folder(tmp_path: Path) -> None:
    plan = read_cluster_plan(written(tmp_path, PLAN))
    assert plan.head == Address("10.0.0.1", 18870) and plan.token_file == tmp_path / "token"
    assert (str(plan.ray_ports), str(plan.door_ports)) == ("21000-21199", "21200-21299")
    assert absolute_adapters(plan) == {"signs": str(tmp_path / "adapters" / "signs")}
    found = plan.replicas
    assert (found.number, found.limit, found.cpus, found.gpus, found.memory_gib) == (2, 4, 8, 1, 16.5)


def test_a_short_plan_has_defaults(tmp_path: Path) -> None:
    text = "head: localhost:1\ntoken_file: t\nreplicas: {number: 3}\n"
    plan = read_cluster_plan(written(tmp_path, text))
    assert (plan.model, plan.adapters, plan.replicas.limit, plan.replicas.cpus) == ("embedded", {}, 3, 1)
    other = tmp_path / "other"
    other.mkdir()
    assert read_cluster_plan(written(other, text)).digest == plan.digest  # whatever the token file's place
    assert read_cluster_plan(written(other, text.replace("3", "4"))).digest != plan.digest


def test_adapters_of_the_plan_may_be_sent(tmp_path: Path) -> None:
    """Then they need not be on the head's machine, and machines that join are not asked for them."""
    plan = read_cluster_plan(written(tmp_path, PLAN))
    assert not plan.ship_adapters
    with pytest.raises(BadConfig, match=r"adapter 'signs' of the plan: .*/adapters/signs has no adapter_config.json"):
        facts_of(plan, "embedded", "10.0.0.1", lambda model: model)
    sent = read_cluster_plan(written(tmp_path, PLAN + "ship_adapters: true\nshipped_gib: 2\n"))
    assert sent.ship_adapters and sent.shipping == (2 << 30, 2 << 30) and sent.digest != plan.digest
    assert plan.shipping == (4 << 30, 20 << 30)
    assert facts_of(sent, "embedded", "10.0.0.1", lambda model: model).adapters == {}


@pytest.mark.parametrize(
    ("before", "after", "line", "field", "message"),
    [
        ("number: 2", "number: 0", 7, "replicas.number", "must be at least 1"),
        ("number: 2", "number: true", 7, "replicas.number", "must be a number"),
        ("most: 4", "most: 1", 7, "replicas", "`most` is 1, and `number` 2"),
        ("cpus: 8", "cpus: 0", 7, "replicas.cpus", "must be at least 1"),
        ("cpus: 8", "cores: 8", 7, "replicas.cores", "is not a known field"),
        ("10.0.0.1:18870", "10.0.0.1", 1, "head", "is '10.0.0.1'; write HOST:PORT"),
        ("10.0.0.1:18870", "10.0.0.1:99999", 1, "head", "with a port from 1 to 65535"),
        ("10.0.0.1:18870", "0.0.0.0:18870", 1, "head", "is '0.0.0.0:18870', which other machines cannot reach"),
        ("21000-21199", "21000", 3, "ray_ports", "write FIRST-LAST"),
        ("21000-21199", "21199-21000", 3, "ray_ports", "in ascending order"),
        ("21000-21199", "80-21000", 3, "ray_ports", "ports from 1024"),
        ("21000-21199", "21000-21010", 1, "plan", "`ray_ports` are 11 ports; 4 replicas need 84"),
        ("21200-21299", "21100-21299", 1, "plan", "overlap"),
        ("10.0.0.1:18870", "10.0.0.1:21250", 1, "plan", "one of `door_ports`"),
        ("token_file: token\n", "", 1, "token_file", "missing"),
        ("adapters:", "ship_adapters: 1\nadapters:", 6, "ship_adapters", "must be true or false"),
        ("adapters:", "shipped_gib: 0\nadapters:", 6, "shipped_gib", "must be above 0"),
        (
            "adapters:",
            "shipped_adapter_gib: 30\nadapters:",
            1,
            "plan",
            "is 30, above the limit `shipped_gib` of all, 20",
        ),
    ],
)
def test_an_invalid_plan_is_refused_with_line_and_field(
    before: str, after: str, line: int, field: str, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, PLAN.replace(before, after))
    with pytest.raises(BadPlan) as caught:
        read_cluster_plan(file)
    assert str(caught.value).startswith(f"{file}, line {line}, field `{field}`: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


TOKEN = b"a token of at least 32 characters"


def facts_here(tmp_path: Path) -> Facts:
    adapter = tmp_path / "signs"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (model / "model.safetensors").write_bytes(bytes(2 << 20))
    return Facts(
        run="r",
        plan="p",
        ray="2.60.0",
        python=python_version(),
        control="127.0.0.1:20000",
        ray_ports=(20_000, 20_299),
        door_ports=(20_300, 20_399),
        most=2,
        model=str(model),
        model_digest=model_digest(str(model)),
        adapters={"signs": Adapter(str(adapter), adapter_digest(str(adapter)))},
    )


@contextlib.asynccontextmanager
async def a_head(
    facts: Facts | None, ahead: datetime.timedelta = datetime.timedelta(0)
) -> AsyncIterator[tuple[Address, list[str]]]:
    """A head's address, and its lines.

    Args:
        facts: None while its Ray does not run.
        ahead: By how much its clock is ahead of this machine's.
    """
    folder, authority, lines = Folder.create(), Authority(lambda: utc_now() + ahead), list[str]()
    try:
        authority.issue("127.0.0.1").write(folder)
        certificate = Certificate(f"{folder.path}/cert.pem", f"{folder.path}/key.pem")
        address = Address("127.0.0.1", 0)
        listener = await HeadListener.open(address, TOKEN, certificate, authority, lambda: facts, lines.append)
        try:
            yield Address("127.0.0.1", listener.port), lines
        finally:
            listener.close()
    finally:
        folder.remove()


def ask(
    facts: Facts | None,
    token: bytes = TOKEN,
    *,
    version: str | None = None,
    change: Callable[[Address], Address] = lambda address: address,
) -> tuple[Admitted, list[str]]:
    """A head's answer and its lines."""

    async def main() -> tuple[Admitted, list[str]]:
        async with a_head(facts) as (address, lines):
            found, line = await ask_head(change(address), token, "", version=version)
            line.close()
            return found, lines

    return asyncio.run(main())


def test_a_machine_gets_the_facts_and_a_certificate(tmp_path: Path) -> None:
    facts = facts_here(tmp_path)
    found, lines = ask(facts)
    assert (found.host, found.facts, lines) == ("127.0.0.1", facts, ["127.0.0.1 joins"])
    folder = Folder.create()
    try:
        found.certificates.write(folder)
        found.certificates.write(folder)  # of a later head
        context = ssl.create_default_context(cafile=f"{folder.path}/ca.pem")
        context.load_cert_chain(f"{folder.path}/cert.pem", f"{folder.path}/key.pem")
        assert stat.S_IMODE(os.stat(f"{folder.path}/key.pem").st_mode) == 0o600
    finally:
        folder.remove()


def test_other_tokens_versions_and_addresses_are_refused(tmp_path: Path) -> None:
    facts = facts_here(tmp_path)
    with pytest.raises(Unauthorized, match=r"^the head at 127\.0\.0\.1:\d+ has another token; copy its token file"):
        ask(facts, b"another token of 32 characters, here")
    other = r"^the head at \S+ has 'vlora \S+ .*', this end 'vlora 9, .*'; install the same"
    with pytest.raises(BadConfig, match=other):
        ask(facts, version="9")
    with pytest.raises(Disconnected, match=r"^no connection to a head at 127.0.0.1:1: .* starts a head$"):
        ask(facts, change=lambda address: Address(address.host, 1))
    with pytest.raises(Disconnected, match=r"Ray does not run on the head; it is started again"):
        ask(None)
    check_versions(facts, "2.60.0")
    with pytest.raises(
        BadConfig, match=r"^Ray 2\.59\.0 is installed here, 2\.60\.0 on the head; install the same: pip"
    ):
        check_versions(facts, "2.59.0")
    with pytest.raises(BadConfig, match=r"^Python 3\.\d+ runs here, and 3\.1 on the head; Ray needs the same"):
        check_versions(msgspec.structs.replace(facts, python="3.1"), "2.60.0")


def test_a_cluster_has_one_front_end_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_head(facts_here(tmp_path)) as (address, lines):
            _, line = await ask_head(address, TOKEN, "10.0.0.7", front_end=True)
            with pytest.raises(BadConfig, match=r"the cluster has a front end already, at 10\.0\.0\.7; end it before"):
                await ask_head(address, TOKEN, "10.0.0.8", front_end=True)
            (await ask_head(address, TOKEN, "10.0.0.8"))[1].close()  # a node joins
            line.close()
            await asyncio.sleep(0.1)
            (await ask_head(address, TOKEN, "10.0.0.8", front_end=True))[1].close()
            assert lines[-1] == "10.0.0.8 joins with the front end"

    asyncio.run(main())


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(
    ("ahead_days", "state"), [(0, None), (0.9, None), (-30, None), (1.1, "are not valid yet"), (-3660, "have expired")]
)
def test_a_clock_by_which_the_certificates_are_not_valid_is_named(
    ahead_days: float, state: str | None, tmp_path: Path
) -> None:
    """ahead_days: of the head's clock."""
    ahead = datetime.timedelta(days=ahead_days)
    facts = msgspec.structs.replace(facts_here(tmp_path), ray=importlib.metadata.version("ray"))

    async def main() -> None:
        async with a_head(facts, ahead) as (address, _):
            membership = Membership(address, TOKEN, Machine("", Resources(1, 0), lambda model: model))
            try:
                found = await membership.ask()
                with pytest.raises(BadConfig):
                    check_clock(found, utc_now() + ahead - datetime.timedelta(days=2))  # the control
            finally:
                membership.close()
                membership.folder.remove()

    if state is None:
        asyncio.run(main())
        return
    earliest = utc_now()
    with pytest.raises(BadConfig) as caught:
        asyncio.run(main())
    message = str(caught.value)
    shown = [
        datetime.datetime.strptime(f"{each} +0000", "%Y-%m-%d %H:%M %z")
        for each in re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d(?= UTC)", message)
    ]
    for time, expected in zip(shown, (earliest, earliest + ahead), strict=True):
        assert abs(time - expected) < datetime.timedelta(minutes=2)
    assert message.startswith("the clock of this machine shows ") and "UTC, that of the head " in message
    assert f"certificates {state} here; set the wrong clock, for example with NTP" in message and "\n" not in message


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/config.json", b'{"torch_dtype": "float16"}', r"^the model \S+ has other files here than on the head"),
        ("model/model.safetensors", b"shorter", r"^the model \S+ has other files here than on the head"),
        ("signs/adapter_model.safetensors", b"WEIGHTS", r"^adapter 'signs' in \S+ has other content than on the head"),
        ("signs/adapter_config.json", None, r"^adapter 'signs' is missing here: \S+ has no adapter_config.json; copy"),
    ],
)
def test_another_model_dtype_or_adapter_is_refused(
    file: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    facts = facts_here(tmp_path)
    check_content(facts, str)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    with pytest.raises(BadConfig, match=message):
        check_content(facts, str)


def test_a_new_token_is_for_this_user_only_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder that cannot be written."""

    def read_only(path: str, content: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    file = tmp_path / "token"
    assert create_token(file) and not create_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(read_token(file)) == 64
    assert os.listdir(tmp_path) == ["token"]
    assert (
        len({derived(read_token(file), purpose) for purpose in ("ray", "replicas", "head")} | {file.read_text()}) == 4
    )
    monkeypatch.setattr("vlora.cluster.nodes.token.write_private", read_only)
    assert not create_token(file)
    with pytest.raises(BadConfig, match=r"^the token file \S+ cannot be created: Read-only file system$"):
        create_token(tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"t" * 64, 0o640, "has mode 0640, so others may use it; run `chmod 600`"),
        (b"t" * 31, 0o600, "has 31 characters; at least 32 are needed"),
        (None, 0o600, "No such file or directory; copy that of `vlora cluster up`"),
    ],
)
def test_an_unusable_token_file_is_refused(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(BadConfig) as caught:
        read_token(file)
    assert message in str(caught.value) and "tttt" not in str(caught.value)


RUN = """
import signal, sys
from vlora.cluster.nodes.runs import registered
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with registered(*sys.argv[1:]):
    print(flush=True)
    signal.pause()
"""


def test_down_finds_what_runs_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ = os.environ | {"TMPDIR": str(tmp_path)}

    def start(*args: str) -> subprocess.Popen[str]:
        found = subprocess.Popen([sys.executable, "-c", RUN, *args], env=environ, stdout=subprocess.PIPE, text=True)
        assert found.stdout is not None and found.stdout.readline()
        return found

    with start("head", "10.0.0.1:1") as head, start("node", "10.0.0.1:1") as node:
        try:
            assert {(run.kind, run.pid) for run in runs.running()} == {("head", head.pid), ("node", node.pid)}
            twice = rf"^a node of 10\.0\.0\.1:1 runs already .* \(process {node.pid}\)"
            with pytest.raises(BadConfig, match=twice), runs.registered("node", "10.0.0.1:1"):
                pass
            os.kill(node.pid, signal.SIGKILL)  # its file stays, and names a process id that others may get
            node.wait()
            (run,) = runs.running()
            assert run.kind == "head" and runs.end(run, 10.0) and not runs.running()
            assert head.wait() == 0
        finally:
            head.kill()
            node.kill()


def test_the_files_of_a_run_that_was_killed_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    former = Folder.create()
    (tmp_path / f"vlora-cluster-{os.getuid()}").mkdir(mode=0o700)
    left = tmp_path / f"vlora-cluster-{os.getuid()}" / "node-10.0.0.1-1"
    left.write_bytes(msgspec.json.encode(runs.Run("node", "10.0.0.1:1", 1, former)))
    with runs.registered("node", "10.0.0.1:1") as entry:
        assert not os.path.exists(former.path)
        entry.note(former)
        (run,) = runs.running()
        assert (run.pid, run.folder) == (os.getpid(), former)
    assert not runs.running()


def test_a_folder_of_runs_that_others_can_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = runs.runs_folder()
    folder.chmod(0o755)
    with pytest.raises(
        VLoraError, match=r"belongs to another user or can be used by others; remove it, or set TMPDIR$"
    ):
        runs.runs_folder()
